"""A place for a mirror of trainers' checkpoints, a bucket or a folder, and the names that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import run_json


@pytest.fixture(params=["bucket", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3").url() if request.param == "bucket" else str(tmp_path / "lustre")


def names_in(place: str) -> list[str]:
    if "://" in place:
        return sorted(row["name"] for row in run_json("ls", place)["checkpoints"])
    folders = [path.parent.name for path in Path(place).glob("*/manifest.json")]
    return sorted(
        [*folders, *(path.name.removesuffix(".manifest.json") for path in Path(place).glob("*.manifest.json"))]
    )
