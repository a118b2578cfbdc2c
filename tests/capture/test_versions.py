"""The native pass over version counters says what torch says of each tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lazyckpt import _engine
from lazyckpt.capture.versions import versions_of


@pytest.fixture(params=["read", "asked"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    _engine.ask_tensors_always(request.param == "asked")
    yield
    _engine.ask_tensors_always(False)


class Override(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("ran code of the subclass")


def set_version(tensor: torch.Tensor, version: int) -> None:
    try:
        torch._C._autograd._unsafe_set_version_counter([tensor], [version])
    except TypeError:  # before torch 2.7
        torch._C._autograd._unsafe_set_version_counter(tensor, version)


@pytest.mark.usefixtures("_way")
def test_every_kind_of_tensor_has_the_version_that_torch_tells() -> None:
    plain, half = torch.zeros(4), torch.zeros(3, dtype=torch.float16)
    tensors = [plain, plain[1:], plain.detach(), plain.view(2, 2), half, torch.nn.Parameter(plain)]
    tensors += [torch.nn.Parameter(torch.zeros(2)), torch.tensor(1), torch.zeros(0), torch.zeros(2).conj()]
    tensors += [torch.eye(2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(2, dtype=torch.complex64).conj()]
    tensors.append(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged))
    for writes in range(3):
        with torch._C.DisableTorchFunctionSubclass():
            assert list(versions_of(tensors)) == [tensor._version for tensor in tensors]
        plain.add_(1)
        for tensor in tensors[:: writes + 1]:
            set_version(tensor, 300 * writes)


@pytest.mark.usefixtures("_way")
def test_a_write_through_another_tensor_of_the_storage_shows() -> None:
    tensor = torch.zeros(4)
    before = versions_of([tensor])
    tensor.detach()[1:3].fill_(1)
    assert versions_of([tensor]) != before


@pytest.mark.usefixtures("_way")
def test_inference_tensors_have_none() -> None:
    with torch.inference_mode():
        made_there = torch.zeros(2)
    assert list(versions_of([torch.zeros(1), made_there])) == [0, -1]


@pytest.mark.usefixtures("_way")
def test_no_code_of_a_subclass_runs() -> None:
    assert list(versions_of([torch.zeros(2).as_subclass(Override)])) == [0]


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="of torch 2.6, each tensor is asked")
def test_this_torch_is_read_directly() -> None:
    assert _engine.reads_versions_directly()
