"""The order of storages in a file: ranks with the same state must agree on it without talking."""

from __future__ import annotations

import math
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.formats.torch_zip import file_order
from lazyckpt.gate.evidence import Evidence

PAGE = 4096
PAGE_ALIGNED_FROM = 64 << 10
SIZES = st.lists(st.sampled_from([8, 5000, 20_000, 65_536, 70_000, 200_000]), min_size=1, max_size=8)


@given(storages=st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans())), data=st.data())
def test_the_order_is_a_permutation_that_depends_on_sizes_and_roles_alone(storages: Any, data: Any) -> None:
    sizes, owned = [size for size, _ in storages], [is_owned for _, is_owned in storages]
    order = file_order(sizes, owned)
    assert sorted(order) == list(range(len(sizes)))
    shuffled = data.draw(st.permutations(range(len(sizes))))
    again = file_order([sizes[at] for at in shuffled], [owned[at] for at in shuffled])
    assert [storages[shuffled[at]] for at in again] == [storages[at] for at in order]


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.booleans())))
def test_small_storages_stand_first_and_each_role_is_together(storages: Any) -> None:
    order = [storages[at] for at in file_order([s for s, _ in storages], [o for _, o in storages])]
    groups = [(size >= PAGE_ALIGNED_FROM, owned) for size, owned in order]
    assert groups == sorted(groups)


def saved_bytes(sizes: list[int], eager: list[bool], folder: Path) -> tuple[bytes, int]:
    """The file of a state of an optimizer, some of whose parameters have no evidence; and its eager bytes."""
    parameters = [torch.nn.Parameter(torch.full((math.ceil(size / 4),), 1.0)) for size in sizes]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    kept = Evidence.without

    def without(self: Evidence, owner: Any, tensors: list[torch.Tensor], at: list[int]) -> list[torch.Tensor]:
        kept(self, owner, tensors, at)
        return [p for p, is_eager in zip(parameters, eager, strict=True) if is_eager] if owner is optimizer else []

    with pytest.MonkeyPatch.context() as patch, lazyckpt.Saver(host_buffer_bytes=16 << 20, witness="versions") as saver:
        patch.setattr(Evidence, "without", without)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        state = {"model": parameters, "optimizer": optimizer.state_dict(), "average": torch.zeros(30_000)}
        handle = saver.save(state, folder / "state.pt")
        return handle.result(timeout=30).read_bytes(), handle.metrics.eager_bytes


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES, data=st.data())
def test_evidence_changes_no_byte_of_the_file(sizes: list[int], data: Any) -> None:
    eager = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    with tempfile.TemporaryDirectory() as folder:
        lazy, fewest = saved_bytes(sizes, [False] * len(sizes), Path(folder))
        mixed, more = saved_bytes(sizes, eager, Path(folder))
    assert mixed == lazy
    large = [
        2 * 4 * math.ceil(size / 4) for size, is_eager in zip(sizes, eager, strict=True) if is_eager and size > PAGE
    ]
    assert more - fewest == sum(large)


def test_eager_bytes_are_copied_first_wherever_they_lie(make_run: Any, disk: Any) -> None:
    """The ring has no room for the lazy storages in front of them while the disk stands still."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    run = make_run(lambda p: torch.optim.SGD(p, lr=0.1), model)
    narrow = torch.nn.Parameter(torch.ones(80 << 8))  # 80 KiB: behind the weights of the layers, and never trained
    run.optimizer.add_param_group({"params": [narrow]})
    run.ckpt.track(narrow=narrow.detach())
    run.step()
    disk.hold()
    timer = threading.Timer(20, disk.release)  # save() would wait for it
    timer.start()
    handle = run.ckpt.save(1)
    timer.cancel()
    with torch.no_grad():
        narrow.zero_()  # no hook sees it: too late for a lazy copy
    assert not disk._free.is_set(), "save() has waited for the disk"
    disk.release()
    path = handle.result(timeout=30) / "state.pt"
    assert handle.metrics.eager_bytes >= narrow.nbytes
    assert torch.equal(torch.load(path)["narrow"], torch.ones(80 << 8))
    with zipfile.ZipFile(path) as archive:
        sizes = [entry.file_size for entry in archive.infolist() if "/data/" in entry.filename]
    assert sizes.index(80 << 10) > sizes.index(256 << 10)
