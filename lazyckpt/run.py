"""Runs a training script, as it is, with every ``accelerate.Accelerator`` that it makes enabled.

    accelerate launch -m lazyckpt.run train.py --its-own arguments
    accelerate launch -m lazyckpt.run -m package.train --its-own arguments

Settings come from ``LAZYCKPT_*`` variables and ``lazyckpt.yaml``; docs/accelerate.md shows both.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any


def main() -> None:
    """The command line: a script or ``-m`` and a module, then the arguments of that."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("usage: accelerate launch -m lazyckpt.run (SCRIPT | -m MODULE) [ARGUMENTS]")
    _enable_all()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _enable_all() -> None:
    from accelerate import Accelerator

    from lazyckpt.integrations.accelerate import enable  # says what to install

    initialize = Accelerator.__init__

    @functools.wraps(initialize)
    def initialize_and_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        enable(self)

    Accelerator.__init__ = initialize_and_enable


if __name__ == "__main__":
    main()
