"""A model in several files and an index, as Hugging Face has it."""

from __future__ import annotations

import json
import os

import torch

from lazyckpt import private_names

private_names.check("python", "torch")


def distributed(
    tensors: dict[str, torch.Tensor], model: str, max_bytes: int
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, bytes]]:
    """Distributes tensors over files, named and filled as Hugging Face does it; returns the files, and the index by its
    name if there are several files. Tensors that share a storage go into one file."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    homes: dict[int, dict[str, torch.Tensor]] = {}  # storage -> its shard
    held = total = 0
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if (home := homes.get(storage._cdata)) is not None:
            home[name] = tensor
            continue
        total += storage.nbytes()
        if storage.nbytes() > max_bytes:  # alone in a shard; the one being filled goes on
            shards.insert(len(shards) - 1, {})
            home = shards[-2]
        else:
            if held + storage.nbytes() > max_bytes:
                shards.append({})
                held = 0
            home = shards[-1]
            held += storage.nbytes()
        home[name] = tensor
        homes[storage._cdata] = home
    if len(shards) > 1 and not shards[-1]:
        shards.pop()
    if len(shards) == 1:
        return {model: shards[0]}, {}
    stem, suffix = os.path.splitext(model)
    files = {f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}": shard for number, shard in enumerate(shards, 1)}
    places = {name: file for file, shard in files.items() for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return files, {f"{model}.index.json": (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}
