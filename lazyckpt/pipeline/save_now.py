"""Saves one file on the calling thread: the steps of launch.py, all eager, then those of persist.py."""

from __future__ import annotations

import time

from lazyckpt import _engine
from lazyckpt.capture.frozen import FrozenParameters
from lazyckpt.capture.ownership import Ownership
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.capture.torn import TornStorages
from lazyckpt.errors import save_error
from lazyckpt.pipeline import persist
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.launch import Plans, gather, lay_out
from lazyckpt.pipeline.persist import Flight
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.to_engine import append, begin_job
from lazyckpt.providers.base import TensorViews


def save_now(request: Request, plans: Plans, engine: _engine.Engine) -> None:
    """Saves a lone file on this thread: copies everything at once and returns when it is durable. No gate, no
    background, and no more memory than ``engine`` has. Raises SaveError."""
    handle = SaveHandle(request.step, request.path)
    begin = time.perf_counter()
    views = gather(plans, handle)
    try:
        snapshot = _all_eager(views, handle, engine)
        programs = lay_out(plans, snapshot, handle)
        snapshot.job = job = begin_job(engine, snapshot, len(programs))
        flight = Flight(handle, request, list(plans), [nbytes for _, nbytes in programs], snapshot, job, begin)
        with persist.aborted_on_error(flight):
            append(job, snapshot, programs)
            staging = persist.create_files(flight)
            job.wait_eager()
            persist.commit(flight, staging, persist.prepare(flight, staging, read_back=False))
    except OSError as error:
        raise save_error(error, path=request.path, step=request.step) from error


def _all_eager(views: list[TensorViews], handle: SaveHandle, engine: _engine.Engine) -> Snapshot:
    """A snapshot for which no step waits, laid out in the order of the object."""
    return Snapshot(
        views,
        Ownership(None, {}),
        FrozenParameters(),
        (),
        any_order=[False] * len(views),
        audit=False,
        engine=engine,
        watched=False,
        torn=TornStorages(),
        metrics=handle.metrics,
        durable=None,
        name_of=lambda view: view.key,
    )
