"""Finds the callbacks that may need a checkpoint's files in ``on_save``.

A callback must see the same in ``on_save`` as in a plain Trainer: the model and the state of that step, and its folder.
So it is called at its time. If it may read the folder, or write into it, the folder has to be there: the Trainer waits
until the checkpoint is durable. The Trainer cannot know in advance what a callback does. So every callback with an
``on_save`` of its own makes the Trainer wait, unless it says ``needs_checkpoint_files = False``, or is one of
transformers' own that leaves the files alone. ``on_push_begin`` is part of a save, too, if there is a push.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

from lazyckpt.storage import commit

_Needs = Callable[[Any], bool]


def _unless(name: str, *harmless: Any) -> _Needs:
    """Whether an attribute has none of these values; if it is missing, we do not know this version."""
    return lambda callback: getattr(callback, name, None) not in harmless or not hasattr(callback, name)


def _never(_: Any) -> bool:
    return False


# The methods of transformers' own callbacks, and when they need the files.
_OWN: dict[tuple[str, str], _Needs] = {
    ("WandbCallback", "on_save"): _unless("_log_model", "false", "end"),
    ("TrackioCallback", "on_save"): _never,
    ("TrackioCallback", "on_push_begin"): _never,
    ("MLflowCallback", "on_save"): _unless("_log_artifacts", False),
    ("NeptuneCallback", "on_save"): _unless("_should_upload_checkpoint", False),
    ("ClearMLCallback", "on_save"): _unless("_log_model", False),
    ("FlyteCallback", "on_save"): _unless("sync_checkpoints", False),
    ("DVCLiveCallback", "on_save"): _unless("_log_model", None, False, True),
    ("SwanLabCallback", "on_save"): _never,
}
_KNOWN: dict[Any, _Needs] = {
    method: needs
    for (cls, event), needs in _OWN.items()
    if (method := getattr(getattr(integration_utils, cls, None), event, None)) is not None
}


def who_needs_files(handler: CallbackHandler, args: TrainingArguments) -> list[str]:
    """Returns the methods for which a save has to wait, such as ``"MyCallback.on_save"``."""
    events = ("on_save", "on_push_begin") if args.push_to_hub else ("on_save",)
    found = [f"{type(handler).__name__}.{n}" for n in (*events, "call_event") if _needs(handler, n, CallbackHandler)]
    for callback in handler.callbacks:
        found += [f"{type(callback).__name__}.{event}" for event in events if _needs(callback, event, TrainerCallback)]
    return list(dict.fromkeys(found))


def _needs(callback: Any, name: str, base: type) -> bool:
    method = getattr(callback, name, None)
    function = getattr(method, "__func__", method)  # an instance may have one of its own
    if function is None or function is getattr(base, name, None):
        return False
    if (told := getattr(callback, "needs_checkpoint_files", None)) is not None:
        return bool(told)
    try:
        return _KNOWN.get(function, lambda _: True)(callback)
    except TypeError:  # not hashable
        return True


def sync_written(folder: str) -> None:
    """Syncs the files that callbacks have put into a checkpoint's folder, unless they have removed it. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(folder):
            commit.sync_all(Path(folder), synced=())
