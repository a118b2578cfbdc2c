"""``.metadata`` from what the ranks list: torch reads it, and what does not fit together is refused by name."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lazyckpt.formats.inventory import Item, Shard, decode, encode, metadata_of, sealed

WEIGHT = ("model", "weight")
TOP = Item(WEIGHT, Shard("float32", (5, 2), (0, 0), (3, 2)), 0, 100)
BOTTOM = Item(WEIGHT, Shard("float32", (5, 2), (3, 0), (2, 2)), 4096, 90)
EPOCH = Item(("loop", "epoch"), None, 8192, 50)


def test_torch_reads_it(tmp_path):
    (tmp_path / ".metadata").write_bytes(sealed(metadata_of({"__0_0.distcp": [TOP, EPOCH], "__1_0.distcp": [BOTTOM]})))
    metadata = FileSystemReader(tmp_path).read_metadata()
    weight = metadata.state_dict_metadata["model.weight"]
    assert (weight.size, weight.properties.dtype) == (torch.Size([5, 2]), torch.float32)
    assert [(chunk.offsets, chunk.sizes) for chunk in weight.chunks] == [((0, 0), (3, 2)), ((3, 0), (2, 2))]
    assert isinstance(metadata.state_dict_metadata["loop.epoch"], BytesStorageMetadata)
    where = metadata.storage_data[MetadataIndex("model.weight", (3, 0))]
    assert (where.relative_path, where.offset, where.length) == ("__1_0.distcp", 4096, 90)
    assert metadata.storage_data[MetadataIndex("loop.epoch")].offset == 8192
    assert metadata.planner_data == {"model.weight": WEIGHT, "loop.epoch": ("loop", "epoch")}


def test_it_names_classes_of_torch_only():
    data = metadata_of({"__0_0.distcp": [TOP, EPOCH], "__1_0.distcp": [BOTTOM]})
    words = [word for opcode, word, _ in pickletools.genops(data) if isinstance(word, str)]
    assert not [word for word in words if "lazyckpt" in word]


def test_of_equal_items_the_first_counts():
    whole = Item(("a",), Shard("int64", (), (), ()), 0, 10)
    metadata = pickle.loads(metadata_of({"zero": [whole], "one": [whole._replace(offset=4096)]}))
    assert metadata.storage_data[MetadataIndex("a", ())].relative_path == "zero"
    assert len(metadata.state_dict_metadata["a"].chunks) == 1


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([BOTTOM._replace(shard=None)], r"model.weight is a float32 tensor of \(5, 2\) in __0.*but an object"),
        ([BOTTOM._replace(shard=BOTTOM.shard._replace(dtype="int8"))], "model.weight is a float32.*but a int8"),
        ([BOTTOM._replace(shard=BOTTOM.shard._replace(size=(6, 2)))], "model.weight .*but a float32 tensor of .6, 2."),
        ([BOTTOM._replace(path=("model.weight",))], "model.weight is .*'model', 'weight'.*'model.weight'"),
        ([BOTTOM, Item(("model",), None, 0, 9)], "model is an object in __1_0.*, but holds model.weight in __0_0"),
        ([], r"model.weight, a float32 tensor of \(5, 2\): the ranks hold \(3, 2\) at \(0, 0\) in __0_0.distcp"),
        ([BOTTOM._replace(shard=BOTTOM.shard._replace(offsets=(2, 0), sizes=(3, 2)))], "the ranks hold"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_by_name(items, told):
    with pytest.raises(ValueError, match=told):
        metadata_of({"__0_0.distcp": [TOP], "__1_0.distcp": items})


def test_lists_survive_the_way_between_ranks():
    items = [TOP, EPOCH, Item(("groups", 0, "ü"), Shard("bool", (), (), ()), 0, 1)]
    assert decode(encode({"model/__0_0.distcp": items, "empty": []})) == {"model/__0_0.distcp": items, "empty": []}
