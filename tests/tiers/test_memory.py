"""A restore from a mirror takes no more memory than the state and what the connections hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lazyckpt
from benchmarks.object_server import object_server

WORDS = 100_000_000  # 400 MB
CONNECTIONS = 64 << 20  # 16 of them; about half of it
RING = 32 << 20  # of load()

SCRIPT = """
import json, sys, torch, lazyckpt
from memory import growth_bytes
url, options, words = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
weights = torch.ones(words)
knobs = {"read_only": True, "host_buffer_bytes": 8 << 20, "chunk_bytes": 2 << 20}
with lazyckpt.Checkpointer("empty", mirrors=[lazyckpt.Mirror(url, options=options)], **knobs) as ckpt:
    ckpt.track(weights=weights)
    assert ckpt.latest_step() == 1
    restored = growth_bytes(ckpt.restore)
assert bool((weights == 7.0).all())
del weights
loaded = growth_bytes(lambda: lazyckpt.load(f"{url}/step-00000001"))
print(json.dumps([restored, loaded]))
"""


@pytest.mark.long
def test_no_second_copy_of_the_state_is_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with lazyckpt.Checkpointer(tmp_path / "a") as ckpt:
        ckpt.track(weights=torch.full((WORDS,), 7.0))
        folder = ckpt.save(1, blocking=True).path
    with object_server() as server:
        server.put({f"run/{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()})
        options = server.options
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "s3://bucket/run", json.dumps(options), str(WORDS)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment(options)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    restored, loaded = json.loads(done.stdout)
    assert restored < CONNECTIONS, restored
    assert loaded < 4 * WORDS + RING + CONNECTIONS, loaded


def environment(options: dict[str, str]) -> dict[str, str]:
    names = ("access_key_id", "secret_access_key", "region")
    return {"AWS_ENDPOINT_URL": options["endpoint"], **{f"AWS_{name}".upper(): options[name] for name in names}}
