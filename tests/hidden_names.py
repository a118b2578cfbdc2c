"""Hides the private names that lazyckpt lists, one after the other, from a process in which lazyckpt's engine has not
been used yet.

    python tests/hidden_names.py PART ...

Without a needed name of PART, its import is refused. Without an optional name of torch, a program trains, saves and
restores.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

PARTS = {
    "python": "lazyckpt.saver",
    "torch": "lazyckpt.saver",
    "torch.distributed.checkpoint": "lazyckpt.integrations.dcp",
    "lightning": "lazyckpt.integrations.lightning",
    "accelerate": "lazyckpt.integrations.accelerate",
    "transformers": "lazyckpt.integrations.transformers",
    "torchtitan": "lazyckpt.integrations.torchtitan",
}
"""The import that must be refused. The part ``torch.distributed`` is checked by a call."""


def forget(prefix: str) -> None:
    """Imports these modules anew, except the engine, which a process can import once."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{prefix}.") and name != "lazyckpt._engine"]:
        del sys.modules[name]


def names_module() -> Any:
    return importlib.import_module("lazyckpt.private_names")


@contextlib.contextmanager
def hidden(owner: str, name: str) -> Iterator[None]:
    """A context without a name: really, if an attribute can be deleted, and otherwise in the eyes of the check."""
    private_names = names_module()
    found, has = private_names._object(owner), private_names._has
    value = vars(found).get(name) if isinstance(found, type | ModuleType) else None
    with contextlib.suppress(TypeError, AttributeError):
        delattr(found, name)
        if not has(found, name):
            try:
                yield
                return
            finally:
                setattr(found, name, value)
        setattr(found, name, value)  # a class above has one, or a method sets it
    private_names._has = lambda obj, asked: (obj is not found or asked != name) and has(obj, asked)
    try:
        yield
    finally:
        private_names._has = has


def refusals(part: str) -> None:
    module = PARTS[part]
    anew = "lazyckpt.integrations" if part not in ("python", "torch") else "lazyckpt"
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    if part != "python":
        importlib.import_module(part)
    for owner, names in names_module().NEEDED[part].items():
        for name in names.split():
            forget(anew)
            with contextlib.ExitStack() as without:
                for one in name.split("|"):
                    without.enter_context(hidden(owner, one))
                names_module()._checked.discard(part)
                refused(lambda: importlib.import_module(module), f"{owner}.{name}")
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks, "lazyckpt has changed torch"
    importlib.import_module(module)


def refused(run: Callable[[], object], name: str) -> None:
    try:
        run()
    except ImportError as error:
        assert f" needs {name}, which " in str(error), error
        assert "pip install --upgrade lazyckpt" in str(error), error
        assert "\n" not in str(error), error
    else:
        raise AssertionError(f"{name} is hidden, and nothing refused")


def found_unless(hidden: str, find: Callable[[str], Any], name: str) -> Any:
    return None if name == hidden else find(name)


def trainings() -> None:
    torch.set_num_threads(1)
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).step()  # imports much of torch
    for name in names_module().OPTIONAL:
        owner, _, last = name.rpartition(".")
        if not owner.startswith("torch.") or not hasattr(names_module()._object(owner), last):
            continue
        forget("lazyckpt")  # but the engine has asked torch nothing yet
        if (child := os.fork()) == 0:
            code = 1
            try:
                private_names = names_module()
                find = private_names.find
                private_names.find = functools.partial(found_unless, name, find)
                proof = importlib.import_module("lazyckpt.gate.proof")
                proof.PURE_METHODS = tuple(method for method in proof.PURE_METHODS if method != last)
                if last == "_dispatch_keys":
                    with hidden(owner, last):  # while the engine looks for it
                        assert not importlib.import_module("lazyckpt._engine").reads_versions_directly()
                train()
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, f"without {name}"


def overridden() -> Iterator[str]:
    """The private names of another package that a class of ours defines anew, beside those of a class above."""
    has, stores = names_module()._has, names_module()._stores
    kinds = {kind for name, module in sys.modules.items() if name.startswith("lazyckpt") for kind in _classes(module)}
    for kind in kinds:
        codes = [member.__code__ for member in vars(kind).values() if inspect.isfunction(member)]
        own = {*vars(kind), *(name for code in codes for name in code.co_names if stores(code, name))}
        above = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "lazyckpt")]
        for name in own:
            if re.match("_[^_]", name) and any(has(base, name) for base in above):
                yield name


def _classes(module: ModuleType) -> list[type]:
    return [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]


class OfUser(torch.optim.Adam):
    """A class whose step lazyckpt has to prove harmless before the closure."""


def train() -> None:
    """Trains, saves in between, restores, and finds the same numbers as at the save."""
    with warnings.catch_warnings(record=True) as given, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        import lazyckpt

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
        optimizer = OfUser(model.parameters())
        data = torch.randn(16, 64)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(data).square().mean()
            value.backward()
            return value

        with lazyckpt.Checkpointer(Path(folder) / "run") as checkpointer:
            checkpointer.track(model=model, optimizer=optimizer)
            for step in range(6):
                optimizer.step(loss)  # type: ignore[arg-type]
                if step == 3:
                    saved = {key: value.clone() for key, value in model.state_dict().items()}
                    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
                    handle = checkpointer.save(step)
            handle.result()
            assert any(not torch.equal(value, saved[key]) for key, value in model.state_dict().items())
            restored = checkpointer.restore()
            assert restored is not None and restored.step == 3
        assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
        assert all(map(torch.equal, moments, (state["exp_avg"] for state in optimizer.state.values())))
        assert len(given) <= 1, [str(warning.message) for warning in given]


if __name__ == "__main__":
    if "torch" in sys.argv:
        trainings()  # first, in children: the engine asks torch once per process
    for part in sys.argv[1:]:
        refusals(part)
    if "lightning" in sys.argv:
        importlib.import_module("lazyckpt.integrations.lightning_sharded")
    listed = {
        name for part in names_module().NEEDED.values() for names in part.values() for name in re.findall(r"\w+", names)
    }
    assert set(overridden()) <= listed | {"_abc_impl", "_is_protocol"}, set(overridden()) - listed
