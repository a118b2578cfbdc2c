"""The table of element types is torch's."""

from __future__ import annotations

import torch

from lazyckpt.cli.skeleton import _STORAGE_DTYPES
from lazyckpt.dtypes import DTYPES


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    assert {str(dtype): dtype.itemsize for dtype in dtypes}.items() <= {
        repr(dtype): dtype.itemsize for dtype in DTYPES.values()
    }.items()
    storages = torch.storage._dtype_to_storage_type_map()
    assert {name: repr(dtype) for name, dtype in _STORAGE_DTYPES.items()} == {
        name: str(dtype) for dtype, name in storages.items()
    }
