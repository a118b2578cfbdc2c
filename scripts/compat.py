"""Runs the tests with the oldest and the newest releases that pyproject.toml allows. `make compat` calls it.

    python scripts/compat.py [ROW…] [--write-docs]

Each row gets an environment of its own below .venv-compat and keeps it. Without a row, all are run. A torch from an
index of CPU builds saves gigabytes: set PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-compat"
RESULTS = ROOT / "build" / "compat"
DOCS = ROOT / "docs" / "works-with.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"
SHOWN = ("torch", "lightning", "accelerate", "transformers")
BUILD = ("scikit-build-core", "pybind11", "cmake", "ninja")
TESTED_WITH = (
    *("numpy", "safetensors", "pytest", "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis", "greenlet"),
    *("matplotlib", "prometheus-client", "psutil", "jsonargparse[signatures]", "schedulefree", "peft"),
)
ENGINE = ("--no-build-isolation", "--config-settings=cmake.define.LAZYCKPT_FAULTS=ON", "--editable", ".")
# The rest is about this repository: documentation, benchmarks, the build, and safeties taken out.
TESTS = (
    "capture",
    "formats",
    "golden",
    "integrations",
    "pipeline",
    "providers",
    "ranks",
    "reading",
    "storage",
    "tools",
)
TESTS += ("test_checkpointer.py", "test_exporters.py", "test_functional.py", "test_history.py", "test_saver.py")


def ranges() -> dict[str, str]:
    """Returns what pyproject.toml says about each framework, as `name` to `>=1.2,<3`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    runtime = text.partition("\ndev = [")[0]
    return {name: re.findall(rf'"{name}(?:\[\w+\])?(>=[\d.,<]+)"', runtime)[0] for name in SHOWN}


def oldest(bounds: str) -> str:
    """Returns the requirement for the first release of a range: `==2.6` for `>=2.6,<3`."""
    return "==" + bounds.removeprefix(">=").partition(",")[0]


def rows() -> dict[str, tuple[str, list[str]]]:
    """Returns the versions of Python and the requirements of each row."""
    allowed = ranges()
    return {
        "oldest": ("3.10", [name + oldest(bounds) for name, bounds in allowed.items()]),
        "newest": ("3.13", [name + bounds for name, bounds in allowed.items()]),
    }


def interpreter(version: str) -> str:
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        raise SystemExit(f"compat: there is no python{version}")
    return found


def environment(row: str, python: str, requirements: list[str]) -> Path:
    """Returns the Python of the row's environment, with everything that the tests need."""
    folder = ENVIRONMENTS / row
    found = folder / "bin" / "python"
    if not found.exists():
        subprocess.run([interpreter(python), "-m", "venv", folder], check=True)
    install = [found, "-m", "pip", "install", "--quiet", "--upgrade"]
    subprocess.run([*install, *requirements, *BUILD, *TESTED_WITH], check=True)
    subprocess.run([*install, *ENGINE], check=True, cwd=ROOT)
    return found


def test(row: str, python: Path) -> dict[str, object]:
    """Runs the tests and returns what the table says about them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = RESULTS / f"{row}.xml"
    tests = [f"tests/{name}" for name in TESTS]
    marks = ("-m", "not slow and not alone", "-n", "auto", "--dist", "loadfile", "--max-worker-restart=0")
    subprocess.run([python, "-m", "pytest", "-q", *marks, f"--junit-xml={report}", *tests], cwd=ROOT, check=False)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    listed = json.loads(subprocess.check_output([python, "-m", "pip", "list", "--format=json"]))
    of_python = subprocess.check_output([python, "-c", "import platform; print(platform.python_version())"], text=True)
    return {
        "python": of_python.strip(),
        "versions": {entry["name"]: entry["version"] for entry in listed},
        "passed": total - skipped - failed,
        "skipped": skipped,
        "failed": failed,
        "date": datetime.date.today().isoformat(),
    }


def table() -> str:
    """Returns the table of docs/works-with.md, from the rows that were run."""
    lines = [
        "| | Python | torch | Lightning | Accelerate | Transformers | passed | skipped | failed | on |",
        "|---" * 10 + "|",
    ]
    for row in rows():
        if (result := RESULTS / f"{row}.json").exists():
            found = json.loads(result.read_text())
            versions = " | ".join(found["versions"][name].partition("+")[0] for name in SHOWN)
            counts = " | ".join(str(found[what]) for what in ("passed", "skipped", "failed", "date"))
            lines.append(f"| {row} | {found['python']} | {versions} | {counts} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[[], *rows()], metavar="ROW", help=", ".join(rows()))
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/works-with.md")
    chosen = parser.parse_args()
    failed = 0
    for row in chosen.rows or rows():
        python, requirements = rows()[row]
        print(f"compat: {row}, Python {python}: {' '.join(requirements)}", flush=True)
        found = test(row, environment(row, python, requirements))
        (RESULTS / f"{row}.json").write_text(json.dumps(found))
        failed += int(str(found["failed"]))
    print(table())
    if chosen.write_docs:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
