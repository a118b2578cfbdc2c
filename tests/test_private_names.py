"""Private names of other packages: all are listed in lazyckpt/private_names.py, and none that is missing ends a run."""

from __future__ import annotations

import ast
import functools
import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_module, spawn

import hidden_names
from lazyckpt import config, private_names
from lazyckpt.capture import owners
from lazyckpt.pipeline.replicated.together import Teams
from private_uses import Use, uses_in, uses_in_native

ROOT = Path(__file__).parents[1]
# Python documents these, although they begin with an underscore.
DOCUMENTED = ("_get_running_loop", "sys._current_frames", "sys._getframe", "_thread.start_new_thread")
OF_NAMED_TUPLES = ("_asdict", "_replace")
# In files that torch.save or torch.distributed.checkpoint has written. They stay as they are, whatever torch does.
IN_FILES = (
    *("_codecs", "_codecs.encode", "_extra_state", "_get_layout", "_rebuild_", "_reconstruct"),
    *("multiarray._reconstruct", "numpy._core.multiarray", "pathlib._local"),
    *("torch._utils._rebuild_", "torch._utils._rebuild_meta_tensor_no_storage", "torch._tensor._rebuild_from_type"),
)
OURS = (
    "_callers",  # of every object with a method that reentry.alone decorates
    *("_0", "_lazyckpt", "_s"),  # endings, and a folder
)
# In the names of DeepSpeed's files.
OF_FILES = (
    *("_expert_", "_mp_rank_", "_model_states.pt", "_optim_states", "_optim_states.pt"),
    *("_mp_rank_00_model_states.pt", "_mp_rank_00_optim_states.pt"),
)
SETTLED = {*DOCUMENTED, *OF_NAMED_TUPLES, *IN_FILES, *OURS, *OF_FILES}
LISTED = [
    *(
        f"{owner}.{name}"
        for part in private_names.NEEDED.values()
        for owner, names in part.items()
        for name in names.replace("|", " ").split()
    ),
    *private_names.OPTIONAL,
]


@functools.cache
def sources() -> dict[str, str]:
    found = {}
    for folder, package in (("lazyckpt", "lazyckpt"), ("integrations", "lazyckpt.integrations")):
        for path in (ROOT / folder).rglob("*.py"):
            words = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *words)).removesuffix(".__init__")] = path.read_text()
    del found["lazyckpt.private_names"]
    return found


@functools.cache
def all_uses() -> list[Use]:
    native = {path.name: path.read_text() for path in (ROOT / "csrc/python").iterdir()}
    return uses_in(sources()) + uses_in_native(native)


def is_of(use: Use, listed: str) -> bool:
    """Whether a use is one of a listed name."""
    if use.kind == "full":
        return use.name == listed or use.name.startswith(f"{listed}.") or listed.startswith(f"{use.name}.")
    word = use.name.partition(".")[0]
    return (
        listed.endswith((f".{word}", use.name))
        or listed.startswith(f"{use.name}.")
        or ("…" in listed and use.name.startswith(listed[:-1]))
    )


def test_every_name_that_is_used_is_listed() -> None:
    unknown = [
        use
        for use in all_uses()
        if use.kind != "override" and use.name not in SETTLED and not any(is_of(use, listed) for listed in LISTED)
    ]
    assert not unknown, "\n".join(["add to lazyckpt/private_names.py, or use a public name:", *map(str, unknown)])


def test_every_name_that_is_listed_is_used() -> None:
    uses = all_uses()
    assert [listed for listed in LISTED if not any(is_of(use, listed) for use in uses)] == []
    assert [name for name in SETTLED if not any(use.name == name for use in uses)] == []


def test_the_scanner_sees_every_way_to_use_a_name() -> None:
    ours = """
class Ours:
    _field: _Annotation = None
    __slots__ = ("_slot",)
    def _method(self):
        self._set = self._field, self._slot, self._method(), self._unknown
        return super()._method(), other._set
def _function(): "_docstring"
"""
    user = """
import foreign._module, foreign.public as alias
from foreign import Class, _private
from foreign._module import name
from lazyckpt.ours import Ours
class Derived(Ours, Class):
    def _override(self):
        super()._method(); super()._override()
        self._variable
_variable = alias.tensor._a.b, alias.public, Class._b, thing()._c.d._e, Ours()._set, getattr(thing, "_f"), "a._g"
thing._own = "no identifier: _h"
"""
    uses = uses_in({"lazyckpt.ours": ours, "lazyckpt.user": user})
    assert sorted((use.kind, use.name) for use in uses) == [
        *(("attribute", name) for name in ("_c", "_e", "_method", "_override", "_own", "_unknown")),
        ("full", "foreign.Class._b"),
        ("full", "foreign._module"),
        ("full", "foreign._module.name"),
        ("full", "foreign._private"),
        ("full", "foreign.public.tensor._a.b"),
        ("override", "_override"),
        *(("text", name) for name in ("_f", "a._g")),
    ]
    native = 'object.attr("_C").attr("_a"); Interned("_b"), def("public", "argument"_a); find(&f, "aoti_torch_c")'
    found = [(use.kind, use.name) for use in uses_in_native({"a.cc": native})]
    assert found == [("full", "torch._C._a"), ("text", "_a"), ("text", "_b"), ("text", "aoti_torch_c")]


def users_of(part: str) -> set[str]:
    names = [
        f"{owner}.{name}"
        for owner, names in private_names.NEEDED[part].items()
        for name in names.replace("|", " ").split()
    ]
    return {use.module for use in all_uses() if any(is_of(use, name) for name in names)}


def imports(module: str, tree: ast.Module, known: dict[str, str]) -> set[str]:
    """The modules of ours that run before the code of ``module``."""
    found = {module.rpartition(".")[0]}
    for node in tree.body:
        for block in (node, *(node.body if isinstance(node, ast.With) else ())):
            if isinstance(block, ast.ImportFrom) and (block.module or "").startswith("lazyckpt"):
                paths = (block.module or "", *(f"{block.module}.{alias.name}" for alias in block.names))
                found |= {path.rsplit(".", up)[0] for path in paths for up in range(path.count(".")) if path in known}
    return found & known.keys()


def test_no_module_uses_a_name_of_torch_unchecked() -> None:
    """An import of any module of the core that uses one runs the check: this module makes it, or one that it imports.
    Those of integrations import the core."""
    known = sources()
    trees = {module: ast.parse(text) for module, text in known.items()}
    calls = {module: [ast.unparse(node) for node in tree.body] for module, tree in trees.items()}
    checked = {module for module, found in calls.items() if "private_names.check('python', 'torch')" in found}
    only_python = {module for module, found in calls.items() if "private_names.check('python')" in found}
    before = -1
    while before != len(checked):
        before = len(checked)
        checked |= {module for module, tree in trees.items() if imports(module, tree, known) & checked}
    of_python, of_torch = map(users_of, ("python", "torch"))
    core = {module for module in known if ".integrations" not in module}
    with_torch = {module for module, text in known.items() if "import torch" in text or "from torch" in text}
    assert of_torch & core & with_torch - checked == set()  # others only show names in files
    assert of_python & core - checked - only_python == set()


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    "parts",
    ["python torch torch.distributed.checkpoint", "lightning accelerate transformers torchtitan"],
    ids=["torch", "trainers"],
)
def test_without_a_name_an_import_is_refused_or_training_goes_on(parts: str, tmp_path: Path) -> None:
    there = [part for part in parts.split() if part != "torchtitan" or importlib.util.find_spec(part)]
    output = tmp_path / "output.txt"
    try:
        spawn(output, run_module, ("hidden_names", there), 1)
    finally:
        print(output.read_text())


def test_folders_of_ranks_are_refused_before_anything_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazyckpt.formats.reader import FileReader
    from lazyckpt.pipeline.joining import Joining
    from lazyckpt.ranks import rank_claims
    from lazyckpt.ranks.group import RankGroup
    from lazyckpt.reading.sharded.metadata import read_metadata

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    (tmp_path / ".metadata").write_bytes(b"anything")
    checkpointer: Any = SimpleNamespace(_writers=None, _crew=None, _is_sharded=lambda: True)
    for part, run in (
        ("torch.distributed", rank_claims.default_store),
        ("torch.distributed", lambda: RankGroup.join(tmp_path, timeout_s=1)),
        ("torch.distributed.checkpoint", lambda: Joining._join_if_shared(checkpointer)),
        ("torch.distributed.checkpoint", lambda: Teams(config.Config(), lambda: None).crew(tmp_path)),
        ("torch.distributed.checkpoint", lambda: read_metadata(FileReader(tmp_path / ".metadata"), None)),
    ):
        owner, names = next(iter(private_names.NEEDED[part].items()))
        monkeypatch.setattr(private_names, "_checked", set())
        with hidden_names.hidden(owner, names.split()[0]):
            hidden_names.refused(run, f"{owner}.{names.split()[0]}")


def test_a_zero_optimizer_without_its_flag_is_copied_eagerly() -> None:
    kind = type("ZeroRedundancyOptimizer", (SimpleNamespace,), {})
    assert owners._writes_outside_step(kind())
    assert not owners._writes_outside_step(kind(_overlap_with_ddp=False))
    assert not owners._writes_outside_step(SimpleNamespace())


def test_the_check_takes_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    for _ in range(20):
        monkeypatch.setattr(private_names, "_checked", set())
        begin = time.process_time()
        private_names.check("python", "torch", "torch.distributed")
        times.append(time.process_time() - begin)
    assert min(times) < 1e-3


def test_the_message_names_versions_and_what_to_do() -> None:
    message = str(private_names._refusal("torch.distributed", "torch.distributed._x"))
    version = torch.__version__
    assert message.startswith(f"lazyckpt {private_names.__version__} needs torch.distributed._x, which torch {version}")
    assert message.endswith(
        "does not have (lazyckpt supports torch>=2.6): pip install 'torch>=2.6' if yours is older, pip install "
        "--upgrade lazyckpt if it is newer"
    )
