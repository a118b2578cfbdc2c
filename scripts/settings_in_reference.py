"""An extension of griffe, for the reference: what ``@spells_out(Settings)`` does to a signature at run time."""

from __future__ import annotations

from typing import Any, cast

import griffe


class SettingsInReference(griffe.Extension):
    """Lists the settings that ``**knobs: Unpack[Settings]`` stands for, with the defaults of ``Config``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name == "lazyckpt":
            self._visit(pkg, pkg["config"])

    def _visit(self, parent: griffe.Object, config: griffe.Module) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member, config)
            elif isinstance(member, griffe.Function):
                for decorator in member.decorators:
                    if decorator.callable_path == "lazyckpt.config.spells_out":
                        call = cast(griffe.ExprCall, decorator.value)
                        _spell_out(member, config[str(call.arguments[0])], config["Config"])


def _spell_out(function: griffe.Function, names: griffe.Class, config: griffe.Class) -> None:
    types = {name: member.annotation for kind in (names, *names.mro()) for name, member in kind.attributes.items()}
    named = [parameter for parameter in function.parameters if parameter.kind != griffe.ParameterKind.var_keyword]
    kind = griffe.ParameterKind.keyword_only
    listed = [
        griffe.Parameter(name, annotation=types[name], kind=kind, default=field.value)
        for name, field in config.attributes.items()
        if name in types
    ]
    function.parameters = griffe.Parameters(*named, *listed)
