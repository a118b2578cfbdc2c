"""Saves one file on the calling thread: the steps of launch.py, all eager, then those of persist.py."""

from __future__ import annotations

import time

from lazyckpt import _engine
from lazyckpt.capture.decision import all_eager
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.capture.sources import Sources
from lazyckpt.errors import save_error
from lazyckpt.pipeline import persist
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.launch import Plans, gather, lay_out
from lazyckpt.pipeline.persist import Flight
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.to_engine import append, begin_job


def save_now(request: Request, plans: Plans, engine: _engine.Engine) -> None:
    """Saves a lone file on this thread: copies everything at once and returns when it is durable. No gate, no
    background, and no more memory than ``engine`` has. Raises SaveError."""
    handle = SaveHandle(request.step, request.path)
    begin = time.perf_counter()
    views = gather(plans, handle)
    try:
        sources = Sources(all_eager(views, engine), views, [])
        programs = lay_out(plans, views, handle)
        job = begin_job(engine, sources, len(programs))
        snapshot = Snapshot(sources, job, handle.metrics)
        flight = Flight(handle, request, list(plans), [nbytes for _, nbytes in programs], snapshot, job, begin)
        with persist.aborted_on_error(flight):
            append(job, sources, programs)
            staging = persist.create_files(flight)
            job.wait_eager()
            persist.commit(flight, staging, persist.prepare(flight, staging, read_back=False))
    except OSError as error:
        raise save_error(error, path=request.path, step=request.step) from error
