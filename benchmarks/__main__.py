"""Run the benchmarks and write a report: `python -m benchmarks` takes minutes, `--full` hours.

Every part is kept beside the report when it is done, and the report is made of all that are there: measure a few parts
in one quiet hour (`--only`) and others in another, or go on after an interruption (`--resume`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil
import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.arms import BEST, KINDS, QUICK, ArmKind
from benchmarks.paired import reason
from benchmarks.parts import PARTS
from benchmarks.report import Section, load_section, show, write_report
from benchmarks.settings import Settings

HERE = Path(__file__).parent
FULL_PAIRS, QUICK_PAIRS = 7, 3
REPORT_WIDTH = 130  # of tables that go into a file
STEPS = 8  # in a block
GB = 1_000_000_000
LOG = "stderr.log"
LOG_EVERY_S = 20.0  # a line of progress, where there is no terminal
EVERY_ENGINE = ("train", "memory")  # parts in which --full means all arms, not the best of each engine


def _arguments() -> argparse.Namespace:
    parts = "\n".join(f"  {name:<16}{part.about}{'' if part.quick else ' (--full)'}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"parts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help=f"all parts and arms, {FULL_PAIRS} pairs")
    parser.add_argument("--only", help="comma-separated parts, see below")
    parser.add_argument("--resume", action="store_true", help="leave out parts that the report has")
    parser.add_argument("--arms", help=f"comma-separated; of {', '.join(_all_arms())}")
    parser.add_argument("--pairs", type=int, help=f"default {QUICK_PAIRS}, with --full {FULL_PAIRS}")
    parser.add_argument("--steps", type=int, default=STEPS, help="in a block (default %(default)s; half outside train)")
    parser.add_argument("--train-gb", type=float, default=0.5, help="AdamW state of the training job")
    parser.add_argument("--disk-gb", type=float, default=1.0, help="tensors that are written and read without training")
    parser.add_argument("--largest-gb", type=float, help="the largest state; default 1, with --full what memory allows")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a sharded job (default %(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--dir", type=Path, default=HERE / "build", help="where checkpoints go: the disk to test")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "benchmarks", help="the report's folder")
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or (FULL_PAIRS if arguments.full else QUICK_PAIRS)
    # In memory beside it: AdamW's gradients, a third of it, and the ring, at most all of it; on the disk, what other
    # engines write.
    arguments.dir.mkdir(parents=True, exist_ok=True)
    allowed = min(psutil.virtual_memory().available, psutil.disk_usage(str(arguments.dir)).free) / GB / 3
    arguments.largest_gb = arguments.largest_gb or (allowed if arguments.full else min(1.0, allowed))
    arguments.arms = _choice(parser, arguments.arms, _all_arms(), [])
    default = [name for name, part in PARTS.items() if part.quick or arguments.full]
    arguments.only = _choice(parser, arguments.only, list(PARTS), default)
    return arguments


def _all_arms() -> list[str]:
    return list(dict.fromkeys(name for part in PARTS.values() for name in part.arms))


def _choice(parser: argparse.ArgumentParser, text: str | None, known: list[str], default: list[str]) -> list[str]:
    chosen = text.split(",") if text else default
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return chosen


def _arms(arguments: argparse.Namespace, part: str) -> list[ArmKind]:
    known = PARTS[part].arms
    names: Sequence[str] = BEST
    if arguments.arms:
        names = [name for name in arguments.arms if name in known]
    elif known is not KINDS:
        names = list(known)
    elif part in EVERY_ENGINE:
        names = list(KINDS) if arguments.full else QUICK
    return [known[name] for name in names]


def _measure(arguments: argparse.Namespace, name: str, directory: Path, progress: Progress) -> Section:
    kinds = _arms(arguments, name)
    settings = Settings(
        directory=directory,
        kinds=kinds,
        pairs=arguments.pairs,
        steps=arguments.steps if name in ("train", "frameworks") else max(2, arguments.steps // 2),
        state_bytes=int(arguments.train_gb * GB),
        disk_bytes=int(arguments.disk_gb * GB),
        largest_bytes=int(arguments.largest_gb * GB),
        ranks=arguments.ranks,
        full=arguments.full,
        device=arguments.device,
        compute={},
        output=arguments.output,
    )
    packages = [*PARTS[name].packages, *(kind.package for kind in kinds)]
    about = machine.describe(arguments.dir, packages)
    if settings.device.type == "cuda":
        about = {"GPU": torch.cuda.get_device_name(settings.device), **about}
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    start = time.monotonic()
    tables = list(PARTS[name].measure(settings, progress))
    return Section(name, about, command, tables, time.monotonic() - start)


class Progress:
    """One line that changes, on a terminal; now and then a line, in a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._told = 0.0
        self.part = ""

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self.part}: {text}")
        elif time.monotonic() - self._told >= LOG_EVERY_S:
            self._told = time.monotonic()
            self.say(f"{self.part}: {text}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self._status is None:
            yield
        else:
            with self._status:
                yield


@contextmanager
def _stderr_into(path: Path) -> Iterator[TextIO]:
    """Peers and their child processes log to stderr, in the middle of the progress line; yields the real one."""
    saved = os.dup(2)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        with open(saved, "w", closefd=False) as stderr:
            yield stderr
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def main() -> None:
    arguments = _arguments()
    console = Console() if sys.stdout.isatty() else Console(width=REPORT_WIDTH)
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: load_section(folder, name) for name in PARTS}
    names = [name for name in arguments.only if not (arguments.resume and before[name])]
    failed: list[str] = []
    with _stderr_into(folder / LOG) as stderr:
        progress = Progress(Console(file=stderr))
        for name in names:
            last = before[name]
            estimate = f"; took {last.seconds:.0f} s with `{last.command}`" if last else ""
            progress.say(f"{name}: {PARTS[name].about}{estimate}")
            progress.part = name
            try:
                with tempfile.TemporaryDirectory(dir=arguments.dir) as scratch, progress.shown():
                    section = _measure(arguments, name, Path(scratch), progress)
            except Exception as error:  # the others go on
                with open(folder / LOG, "a") as log:
                    traceback.print_exc(file=log)
                progress.say(f"{name} failed: {reason(error)}; see {folder / LOG}")
                failed.append(name)
                continue
            section.store(folder)
            for table in section.tables:
                show(console, table)
            found = (load_section(folder, known) for known in PARTS)
            report = write_report(folder, [known for known in found if known is not None])
            progress.say(f"{name}: {section.seconds:.0f} s; report: {report}")
    sys.exit(f"not measured: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
