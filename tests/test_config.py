"""Every knob: what makes no sense is refused when it is given, with its name and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt.config import Config
from lazyckpt.pipeline import budget
from lazyckpt.pipeline.budget import auto_ring_bytes, available_memory_bytes

ABSURD: list[dict[str, Any]] = [
    {"max_in_flight": 0},
    {"max_in_flight": -1},
    {"max_in_flight": 65},
    {"max_in_flight": True},
    {"io_depth": 0},
    {"rank_timeout_s": 0},
    {"rank_timeout_s": "60"},
    {"rank_timeout_s": True},
    {"rank_timeout_s": float("inf")},
    {"io_depth": 1 << 40},
    {"copy_threads": 0},
    {"copy_threads": 1 << 40},
    {"chunk_bytes": 4097},
    {"chunk_bytes": 1 << 40},
    {"chunk_bytes": "16 MiB"},
    {"host_buffer_bytes": 0},
    {"host_buffer_bytes": 8 << 20},  # one chunk
    {"host_buffer_bytes": 1 << 70},
    {"host_buffer_bytes": "much"},
    {"keep_last": 0},
    {"keep_every": 0},
    {"keep_every": 2.0},
    {"durability": "sometimes"},
    {"on_error": None},
    {"read_only": 1},
    {"io_backend": "aio"},
    {"unheard_of": 1},
]


@pytest.mark.parametrize("knobs", ABSURD, ids=str)
def test_an_absurd_knob_is_refused_by_name(knobs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match=next(iter(knobs))):
        lazyckpt.Checkpointer(tmp_path / "run", **knobs)
    assert not (tmp_path / "run").exists()


def test_a_removed_setting_says_why_and_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match=r"witness='copy' was removed: .* Use witness=\"auto\""):
        lazyckpt.Checkpointer(tmp_path, witness="copy")  # type: ignore[arg-type]


def test_the_defaults_and_their_limits_are_accepted() -> None:
    Config()
    Config(max_in_flight=64)
    Config(chunk_bytes=4096, host_buffer_bytes=8192, max_in_flight=1, io_depth=1, copy_threads=1, keep_last=1)


def test_auto_is_a_quarter_of_what_is_available_to_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 8 << 30)
    assert auto_ring_bytes(16 << 20) == 2 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert auto_ring_bytes(16 << 20) == 512 << 20
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 0)
    assert auto_ring_bytes(16 << 20) == 32 << 20, "two chunks at least, or nothing could be saved"


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            "0::/job/step",
            {"job/memory.max": "1000000", "job/memory.current": "700000", "job/memory.stat": "inactive_file 300000"},
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "1000000",
                "memory/job/memory.usage_in_bytes": "500000",
                "memory/job/memory.stat": "cache 7\ntotal_inactive_file 100000",
            },
        ),
    ],
)
def test_available_memory_heeds_the_cgroups_above_this_process(
    cgroup: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.read_text
    fakes = {"/proc/self/cgroup": cgroup, **{f"/sys/fs/cgroup/{name}": text for name, text in files.items()}}

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        return fakes.get(str(self)) or plain(self, *args, **kwargs)

    assert available_memory_bytes() > 1 << 20
    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory_bytes() == 600000
