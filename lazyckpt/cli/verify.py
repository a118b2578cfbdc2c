"""``lazyckpt verify``: prints which files and checkpoints are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazyckpt.cli.output import print_error, print_json, progress, say
from lazyckpt.cli.parameters import AsJson, path_argument, placed
from lazyckpt.tools.checksums import Finding
from lazyckpt.tools.units import count, plain, size
from lazyckpt.tools.verify import verify_each

_CODES = {"ok": 0, "gone": 0, "damaged": 1, "unreadable": 2}
_SHORTEST_BYTES = 1_000_000  # below that, opening the file takes most of the time


def verify(
    paths: Annotated[
        list[Path], path_argument("FILE|DIR...", "Files, checkpoints, or folders: all that is in them. Also URLs.")
    ],
    as_json: AsJson = False,
) -> None:
    """Read files and checkpoints, and compare every checksum in them.

    Exit code: 0 if everything is whole, 1 if something is damaged, 2 if something could not be read.
    """
    findings: list[Finding] = []
    with progress() as report:
        for path in paths:
            for finding in verify_each(placed(path), report):
                findings.append(finding)
                if not as_json:
                    _print(finding)
    codes = [_CODES[finding.state] for finding in findings]
    if as_json:
        keys = ("path", "state", "bytes", "records", "without_checksum", "damage")
        print_json({"targets": [{key: getattr(finding, key) for key in keys} for finding in findings]})
    elif len(findings) > 1:
        whole, damaged, unreadable = (codes.count(code) for code in (0, 1, 2))
        say(f"{whole} ok, {damaged} damaged, {unreadable} unreadable")
    raise typer.Exit(1 if 1 in codes else max(codes))  # an unreadable path does not hide damage


def _print(finding: Finding) -> None:
    if finding.state == "unreadable":
        print_error(*finding.damage)
        return
    style = {"ok": "green", "damaged": "bold red"}.get(finding.state, "")
    parts: list[str | tuple[str, str]] = [(finding.state, style), "  ", (plain(finding.path), "bold")]
    if finding.records:
        parts.append(f"  {count(finding.records, 'record')}, {size(finding.bytes)}")
        if finding.bytes > _SHORTEST_BYTES:
            parts.append(f", {finding.bytes / finding.seconds / 1e9:.2f} GB/s")
    if finding.without_checksum and not finding.whole_file_checked:
        none = "carries no checksums: readable, but damage would go unnoticed"
        some = f"{count(finding.without_checksum, 'record')} without a checksum: not compared"
        parts.append((f"\n    {none if finding.without_checksum == finding.records else some}", "yellow"))
    say(*parts, *(f"\n    {plain(line)}" for line in finding.damage))
