"""``Checkpointer``: tracks the state of a run, restores it, and saves it while training goes on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from lazyckpt.config import MIB, RunSettings, check_names, check_writers, spells_out
from lazyckpt.errors import ConfigError
from lazyckpt.gate import averages
from lazyckpt.history import checked_metrics, checked_step
from lazyckpt.mirroring import at_the_end, call
from lazyckpt.observe.interval import interval
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.plan import ArchiveCache
from lazyckpt.pipeline.reentry import alone
from lazyckpt.pipeline.replicated.plan import ReplicaCache
from lazyckpt.pipeline.request import About, Lineage
from lazyckpt.pipeline.sharded.crew import Crew, rank_here, warn_if_alone
from lazyckpt.providers.casting import CastModuleProvider
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.data_loader import track_loader
from lazyckpt.providers.global_state import holds_shards
from lazyckpt.providers.kinds import kinds_of
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.optimizer import OptimizerProvider
from lazyckpt.providers.sharded import refuse_partial, refuse_sharded_tensors
from lazyckpt.providers.training import LoaderProvider, RngProvider, provider_for
from lazyckpt.ranks.rank_claims import RankClaims
from lazyckpt.restoring import RNG, Restoring
from lazyckpt.saver import Saver
from lazyckpt.storage import manifest, paths
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.opening import prepare
from lazyckpt.storage.retention import Best
from lazyckpt.warn import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()  # Checkpointers of this process that are not read_only
_READ_AHEAD_BYTES = 64 * MIB


class Checkpointer(Restoring):
    """Saves and restores a training run in the folder ``directory``. Makes the folder if it is missing.

        with lazyckpt.Checkpointer("runs/a") as ckpt:
            ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler)
            loader = ckpt.track_loader(loader)
            step = ckpt.restore() or 0
            ...
            optimizer.step()
            ckpt.save(step)

    ``save_every`` is for ``maybe_save``: a number of steps, or "auto": as often as possible while checkpoints cost at
    most the fraction ``max_overhead`` of the training time. ``read_only`` is for a process that only restores, beside
    the one that saves: it writes nothing into the folder. The other keyword arguments are the fields of ``Config``.

    ``writers`` is for ranks that hold the same state (DistributedDataParallel), and lets them write its one file
    together, each an equal part: "all" ranks, one of each "node", so many, or "rank0"; "auto" takes as many as have
    16 MiB each to write. Every rank then makes a Checkpointer, tracks, saves and restores (docs/many-ranks.md).

    One thread at a time may call: a second one, and a signal handler inside a call, get a ConfigError.
    Raises ConfigError for an invalid knob, ReadError if the folder cannot be read, SaveError if it cannot be written
    to. If such a folder holds checkpoints, that is a warning instead: they can be restored, and saves fail.
    """

    @spells_out(RunSettings)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int | Literal["auto"] | None = None,
        max_overhead: float = 0.02,
        read_only: bool = False,
        writers: Literal["auto", "all", "node", "rank0"] | int | None = None,
        **knobs: Unpack[RunSettings],
    ) -> None:
        self.directory = paths.local(directory)
        self._interval = None if save_every is None else interval(save_every, max_overhead)
        self._auto = save_every == "auto"
        if not isinstance(read_only, bool):
            raise ConfigError(f"read_only={read_only!r}: expected true or false")
        check_writers(writers)
        check_names(type(self).__name__, knobs, "save_every", "max_overhead", "read_only", "writers")
        mirrors: Any = knobs.pop("mirrors", ())
        self._tracked: dict[str, Any] = {}  # objects by name
        self._leaving = at_the_end(self)  # made before the Saver, so at exit it runs when that is done
        self._saver = Saver(**knobs)
        self._launcher = self._saver.launcher
        self._launcher.label = f"the Checkpointer of {self.directory}"
        self._callers = self._launcher.callers
        self.config = replace(self._saver.config, mirrors=mirrors)
        self._catalog = Catalog(self.directory, missing_ok=read_only and bool(mirrors))
        self._claims = RankClaims(self.directory)
        self._leaving.append(self._claims.leave)
        config, self._read_only, self._writers = self.config, read_only, writers
        self._best = None if config.best is None else Best(config.best, config.mode, config.keep_best or 0)
        self._warned_of_newer = self._warned_of_metric = False
        try:
            self._open_mirrors(mirrors)
            if not read_only:
                self._open_for_saves()
            self._lineage = Lineage(
                self._catalog,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                best=self._best,
                mirrors=self._mirrors,
            )
            if self._mirrors is not None and not read_only and rank_here() == 0:
                self._mirrors.start(self._lineage.known)
        except BaseException:
            self._saver.close()
            raise
        self._last_step: int | None = None  # of the last call of save()
        self._training_step = object()  # another one at each call of save(), which may repeat a step
        self._provider = CompositeProvider()
        self._archive = ArchiveCache()
        self._tracks_shards = False
        self._crew: Crew | None = None  # the ranks that save together: a state that is sharded, or with ``writers``
        self._replicas: ReplicaCache | None = None  # with ``writers``, of ranks that hold the same state
        if (newest := self._lineage.newest) is not None:  # restore() reads ahead; the first save grows the ring further
            self._saver.reserve(min(newest.nbytes, _READ_AHEAD_BYTES))
        self._track(RNG, RngProvider())

    def _open_for_saves(self) -> None:
        prepare(self._catalog, sweeps=rank_here() == 0)  # for all ranks; the others may be saving there already
        there = self.directory.resolve()
        if any(other.directory.resolve() == there for other in _open if not other._saver.closed):
            warn(
                f"another Checkpointer of this process is open for {self.directory}; a run belongs to one: close it "
                "first, or open those that only restore with read_only=True"
            )
        _open.add(self)

    # the state

    def track(self, *, replace: bool = False, save_dtype: torch.dtype | None = None, **state: Any) -> None:
        """Add state to save, by name. Values: modules, optimizers, anything with ``state_dict``/``load_state_dict``,
        tensors, dicts and lists (restored in place), or a ``StateProvider``.

        Tracking the same object under the same name again changes nothing; ``replace=True`` puts another object in its
        place. ``save_dtype`` saves the floating-point tensors of modules in this dtype, for copies that are published;
        ``save()`` converts them before it returns, in host memory, which holds them until they are copied. The random
        number generators are tracked as ``rng``.

        With ``writers``, every rank has its own random states, loaders, samplers and datasets back, and everything else
        is the same on all ranks; of buffers, such as the statistics of BatchNorm, rank 0's are saved.

        DTensors (FSDP2, tensor parallelism) make the checkpoint a folder of torch.distributed.checkpoint that all ranks
        write together: then every rank makes a Checkpointer, tracks and saves. Random states, loaders, samplers and
        datasets are each rank's own; of other state that is not sharded, rank 0's is saved.

        Raises ConfigError for other values, for a ShardedTensor, and with ``writers`` for a ZeroRedundancyOptimizer.
        """
        self._launcher.check_usable()
        averages.guard_imported()
        for name, obj in state.items():
            if name in self._tracked and self._tracked[name] is obj:
                known = self._provider.parts[name]
                if (known.save_dtype if isinstance(known, CastModuleProvider) else None) == save_dtype:
                    continue
                if not replace:
                    raise ConfigError(f"track: {name!r} is tracked with another save_dtype; replace=True changes it")
            if name == RNG:
                raise ConfigError(f"track: the name {name!r} is taken (reserved for the random number generators)")
            if name in self._provider.parts and not replace:
                there = type(self._tracked[name]).__name__
                raise ConfigError(f"track: the name {name!r} is taken by another {there}; replace=True replaces it")
            refuse_sharded_tensors(obj, name)
            if save_dtype is not None and not isinstance(obj, torch.nn.Module):
                raise ConfigError(f"track: {name!r}: save_dtype is for modules, not for a {type(obj).__name__}")
            if save_dtype is not None and holds_shards(ModuleProvider(obj)):
                raise ConfigError(f"track: {name!r}: save_dtype is for modules that are not sharded")
            if isinstance(replaced := self._provider.parts.get(name), ModuleProvider):
                self._saver.unwatch(replaced.obj)
            self._track(name, obj, save_dtype)
            self._tracked[name] = obj

    def track_loader(self, loader: Any, name: str = "loader", *, replace: bool = False) -> Any:
        """Track a data loader. Iterate the returned object instead: a wrapper that knows its position, or the loader
        itself if it has ``state_dict`` and ``load_state_dict``. Each rank has its own. ``replace``: as in ``track``."""
        known = self._provider.parts.get(name)
        if isinstance(known, LoaderProvider) and known.iterates(loader):
            return known.obj
        wrapped = track_loader(loader)
        replace = replace or self._tracked.get(name) is wrapped  # so far tracked as state that all ranks share
        own: dict[str, Any] = {name: LoaderProvider(wrapped)}
        self.track(replace=replace, **own)
        self._tracked[name] = wrapped
        return wrapped

    def _track(self, name: str, obj: Any, save_dtype: torch.dtype | None = None) -> None:
        provider = provider_for(name, obj) if save_dtype is None else CastModuleProvider(obj, save_dtype)
        # RNG last: restoring other state may draw random numbers.
        parts = {**self._provider.parts, name: provider}
        if RNG in parts:
            parts[RNG] = parts.pop(RNG)
        self._provider.parts = parts
        tracked_shards, self._tracks_shards = self._tracks_shards, self._tracks_shards or holds_shards(provider)
        if self._read_only:
            return
        if self._tracks_shards and not tracked_shards:
            self._claims.announce()
        if self._writers is not None:
            refuse_partial(provider, name)
        if isinstance(provider, ModuleProvider):
            self._saver.watch(provider.obj)
        if isinstance(provider, ModuleProvider | OptimizerProvider):
            self._saver.expect(provider.obj)

    # save

    @alone("save()")
    def save(self, step: int, *, metrics: Mapping[str, float] | None = None, blocking: bool = False) -> SaveHandle:
        """Snapshot the tracked state as checkpoint ``step`` and make it durable in the background.

        Returns in milliseconds. State that only an optimizer step changes is copied during the next forward and
        backward; the next ``optimizer.step()`` waits for these copies. Everything else is copied before this returns.
        Waits while ``max_in_flight`` checkpoints are not durable yet. ``blocking=True`` returns when it is durable.
        ``metrics``, numbers by name, are kept in the manifest: ``lazyckpt ls`` shows them, ``keep_best`` compares them.

        Raises SaveError if an earlier checkpoint failed in the background (``on_error="raise"``) or if this one fails
        at once. A call that raises an earlier failure saves its own step all the same, and says so. With
        ``on_error="warn"`` these are warnings, and the handle holds the error.
        """
        self._refuse_read_only("save()")
        path = self.directory / manifest.folder_name(checked_step(step))
        crew = self._join_if_shared()
        try:
            arrivals = None if self._mirrors is None else self._mirrors.expect()
            about = About(checked_metrics(metrics), kinds_of(self._provider.parts), arrivals)
        except ConfigError as error:
            if crew is not None:
                crew.refused(path, step, str(error))
            raise
        if self._best is not None and about.metrics and self._best.metric not in about.metrics:
            self._warn_of_metric(about.metrics, self._best)
        if self._last_step is None:
            warn_if_alone()
        self._last_step, self._training_step = step, object()
        request, plans = self._request(crew, path, step, about)
        handle = self._launcher.launch(request, plans, blocking=blocking, training_step=self._training_step)
        handle.arrivals = arrivals
        return handle

    def _warn_of_metric(self, given: Mapping[str, float], best: Best) -> None:
        if not self._warned_of_metric:
            self._warned_of_metric = True
            has = ", ".join(given)
            warn(f"save: metrics has {has}, but not best={best.metric!r}; such a checkpoint is never the best")

    @alone("save_part()")
    def save_part(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        blocking: bool = False,
    ) -> SaveHandle:
        """Save one tracked module as a file of its own, as lazily as a checkpoint: ``torch.save``'s format, or
        safetensors if the name ends so. Call it after the ``save`` of that step, if there is one: the first of two
        saves without a step between them is the lazy one.

        ``dtype`` converts the floating-point tensors, as ``save_dtype`` of ``track`` does. Waits and raises as ``save``
        does; ConfigError if ``name`` is no tracked module.
        """
        provider = self._provider.parts.get(name)
        if not isinstance(provider, ModuleProvider):
            modules = [name for name, part in self._provider.parts.items() if isinstance(part, ModuleProvider)]
            raise ConfigError(f"save_part: {name!r} is no tracked module; there is: {', '.join(modules) or 'none'}")
        return self._saver.save_at(
            self._training_step, provider.state(), path, step=self._last_step, dtype=dtype, blocking=blocking
        )

    def maybe_save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> SaveHandle | None:
        """Save if it is time. Call this once after every optimizer step.

        With ``save_every=n`` it is time at every multiple of ``n``; with "auto", every ``interval`` steps.
        Raises ConfigError without ``save_every``, and the errors of ``save``.
        """
        if self._interval is None:
            raise ConfigError('maybe_save: give the Checkpointer save_every, a number of steps or "auto"')
        if self._auto and self._join_if_shared() is not None:
            raise ConfigError(
                'save_every="auto": every rank would measure an interval of its own; give a number of steps'
            )
        self._launcher.check_usable()
        if not self._interval.due(checked_step(step), in_flight=bool(self._saver.pending())):
            return None
        handle = self.save(step, metrics=metrics)
        self._interval.saved(handle.metrics)
        return handle

    @property
    def interval(self) -> int | None:
        """Steps between checkpoints of ``maybe_save``; None without ``save_every``.

        With ``save_every="auto"``, the shortest interval that keeps the overhead within ``max_overhead`` and in which a
        checkpoint becomes durable. Overhead is the time in ``save()`` plus the slowdown of iterations until the
        checkpoint is durable. Tuned after every checkpoint."""
        return None if self._interval is None else self._interval.every

    # the end

    def close(self) -> None:
        """Wait until every checkpoint is durable and the mirrors have theirs; stop the threads. Does not wait for a
        mirror that fails: the next Checkpointer of this folder uploads the newest. Raises the SaveError of a
        checkpoint that failed."""
        try:
            self._saver.close()
        finally:
            call(self._leaving)

    def __repr__(self) -> str:
        state = "read_only" if self._read_only else f"{len(self._saver.pending())} saves in flight"
        if self._saver.closed:
            state = "closed"
        return f"<Checkpointer {self.directory}: tracks {', '.join(self._provider.parts)}; {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the Checkpointer of {self.directory} cannot be copied or pickled, since one process at a time saves into "
            "a folder; make one where the training runs, and call track() and restore() there"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *raised: Any) -> Literal[False]:
        try:
            return self._saver.__exit__(*raised)
        finally:
            call(self._leaving)
