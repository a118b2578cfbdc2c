"""The public names, and the kinds of errors."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import lazyckpt
from lazyckpt import errors


def test_exported_names_exist_and_are_sorted() -> None:
    assert lazyckpt.__all__ == sorted(lazyckpt.__all__, key=lambda name: (name.islower(), name))
    assert all(hasattr(lazyckpt, name) for name in lazyckpt.__all__)


def test_names_are_there_before_anything_is_imported() -> None:
    """A new process imports a public name at its first use. No import initializes a GPU or installs a hook."""
    script = (
        "import sys\n"
        "import lazyckpt\n"
        "assert 'torch' not in sys.modules and not set(sys.modules) & {'lazyckpt.' + m for m in ('errors', 'tools')}\n"
        "assert [name for name in dir(lazyckpt) if name[0] != '_'] == sorted(lazyckpt.__all__)\n"
        "assert lazyckpt.errors.LoadError is lazyckpt.LoadError and 'torch' not in sys.modules\n"
        "assert lazyckpt.exporters.Prometheus\n"
        "from lazyckpt import *\n"
        "from lazyckpt.checkpointer import Checkpointer as there\n"
        "assert Checkpointer is lazyckpt.Checkpointer is there\n"
        "assert all(vars(lazyckpt)[name] is globals()[name] for name in lazyckpt.__all__)\n"
        "import torch\n"
        "from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\n"
        "assert not hooks and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    stub = (Path(lazyckpt.__file__).parent / "__init__.pyi").read_text()
    assert stub.count(" as ") == len(lazyckpt.__all__) + 1


def test_names_that_are_not_there() -> None:
    """Fails as any module does, and does not hide an error inside one of ours."""
    assert not hasattr(lazyckpt, "Chekpointer") and not hasattr(lazyckpt, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'Chekpointer'"):
        exec("from lazyckpt import Chekpointer")
    with pytest.raises(AttributeError, match="module 'lazyckpt' has no attribute 'Chekpointer'"):
        _ = lazyckpt.Chekpointer
    broken = "import lazyckpt, sys; sys.modules['torch'] = None; lazyckpt.saver"
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr.splitlines()[-1]


def test_nothing_private_leaks_through_a_public_name() -> None:
    own = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.LazyCkptError)}
    assert own <= set(lazyckpt.__all__)
    for name in lazyckpt.__all__:
        assert not name.startswith("_")
        assert getattr(lazyckpt, name).__module__.startswith("lazyckpt")
        assert getattr(lazyckpt, name).__doc__


def test_errors_say_step_path_and_cause_and_survive_pickling() -> None:
    """A launcher that runs training in a subprocess sends exceptions through a pipe."""
    assert issubclass(lazyckpt.ConfigError, ValueError)
    kinds = (lazyckpt.SaveError, lazyckpt.NoSpaceError, lazyckpt.SerializationError, lazyckpt.TornSnapshotError)
    of_saves = [kind("why", path="a/b", step=7) for kind in kinds]
    for error in of_saves:
        assert isinstance(error, lazyckpt.SaveError)
        assert "step 7" in str(error) and "a/b" in str(error) and "why" in str(error)
    for error in (*of_saves, lazyckpt.CorruptFileError("why", path="a"), lazyckpt.RestoreError("why")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
