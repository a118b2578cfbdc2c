"""Runs a training script, as it is, with lazyckpt enabled.

    accelerate launch -m lazyckpt.run train.py --its-own arguments
    deepspeed --module lazyckpt.run train.py --deepspeed_config ds.json
    torchrun -m lazyckpt.run -m package.train --its-own arguments

Every ``accelerate.Accelerator`` and every DeepSpeed engine that the script makes is enabled. Settings come from
``LAZYCKPT_*`` variables and ``lazyckpt.yaml``, for DeepSpeed also from its JSON; docs/accelerate.md and
docs/deepspeed.md show them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def main() -> None:
    """The command line: a script or ``-m`` and a module, then the arguments of that."""
    arguments = sys.argv[1:]
    launched = [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank=") else []  # by `deepspeed`
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("usage: python -m lazyckpt.run (SCRIPT | -m MODULE) [ARGUMENTS]")
    _enable_all()
    sys.argv = [arguments[0], *launched, *arguments[1:]]
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _enable_all() -> None:
    """Enables what the script will make, as soon as it imports the framework."""
    if not any(importlib.util.find_spec(name) for name in _FRAMEWORKS):
        _enable_accelerators()  # says what to install
    for name, enable in _FRAMEWORKS.items():
        if name in sys.modules:
            enable()
        else:
            sys.meta_path.insert(0, _OnImport(name, enable))


def _enable_accelerators() -> None:
    from lazyckpt.integrations.accelerate import enable  # says what to install

    from accelerate import Accelerator  # isort: skip

    initialize = Accelerator.__init__

    @functools.wraps(initialize)
    def initialize_and_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        enable(self)

    Accelerator.__init__ = initialize_and_enable


def _enable_deepspeed() -> None:
    from lazyckpt.integrations import deepspeed

    deepspeed.enable_all()


_FRAMEWORKS: dict[str, Callable[[], None]] = {"accelerate": _enable_accelerators, "deepspeed": _enable_deepspeed}


class _OnImport(MetaPathFinder, Loader):
    """Calls ``then`` when the package ``name`` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec) if self._own is not None else None

    def exec_module(self, module: ModuleType) -> None:
        assert self._own is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._then()


if __name__ == "__main__":
    main()
