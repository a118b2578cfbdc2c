"""Prints the installed packages as constraints for pip: the versions that the tests pass with.

A release that left a version of Python behind is pinned for the newer ones only; the older ones get the last that
supports them.
"""

import re
import sys
from importlib.metadata import distributions

NOT_OURS_TO_PIN = {"lazyckpt", "pip"}
OLDEST = 10  # Python 3.10
PLACES = [*sys.path, f"{sys.prefix}/deepspeed"]  # tests/requirements-deepspeed.txt

print("# What `make setup` installs; CONTRIBUTING.md says how to renew it.")
for name, version, python in sorted(
    (re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), d.version, d.metadata.get("Requires-Python") or "")
    for d in distributions(path=PLACES)
):
    if name not in NOT_OURS_TO_PIN:
        needs = re.search(r">=\s*3\.(\d+)", python)
        newer = needs is not None and int(needs[1]) > OLDEST
        marker = f' ; python_version >= "3.{needs[1]}"' if newer and needs else ""
        print(f"{name}=={version.partition('+')[0]}{marker}")
