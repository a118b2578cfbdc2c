"""Lazy, durable checkpointing for PyTorch training, on standard files."""

import importlib
import os
import sys

from lazyckpt._version import __version__ as __version__

# The stub beside this file lists every public name once, with its module, for type checkers and for __getattr__.
_MODULES: dict[str, str] = {}
with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as _stub:
    for _line in _stub:
        if _line.startswith("from lazyckpt."):
            _, _module, _, _name, *_ = _line.split()
            _MODULES[_name] = _module
del _MODULES["__version__"]

__all__ = sorted(_MODULES, key=lambda name: (name.islower(), name))


def __getattr__(name: str) -> object:
    """Imports a public name, or a module of this package, at its first use (PEP 562): importing torch takes seconds."""
    if name in _MODULES:
        found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return found
    try:
        if not name.startswith("__"):
            return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"importlib", "os", "sys"})
