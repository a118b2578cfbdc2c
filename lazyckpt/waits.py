"""How long lazyckpt waits, and how often it looks: every such time in one place, with its reason.

Times that a user may set (``rank_timeout_s``) are fields of ``Config``. All times are in seconds. Read them as
``waits.NAME`` where they are used, so that a test can replace one. The engine, which imports no Python, keeps its own:
1 s for eager copies in ``Engine::Capture``, 1 ms before a write that failed with EAGAIN is retried, and 100 ms between
two looks for Ctrl-C.
"""

import threading


def pause(seconds: float) -> None:
    """Sleeps, and shows on the stack that the thread waits: another rank may need its verdict (gate/standing.py)."""
    threading.Event().wait(seconds)


def join(thread: threading.Thread) -> None:
    """Waits for its end, in turns: a signal that comes just before a wait does not end that wait."""
    while thread.is_alive():
        thread.join(HANDLE_LOOK_S)


# The gate (gate/exclusion.py): saves and steps on different threads.

STEP_LOOK_S = 0.02
"""Between two looks whether a step or a save on another thread still runs. Its end usually notifies; only a call that
raised ends silently. Shorter costs the training thread's core, longer adds to the wait after an exception."""

STEP_GIVES_WAY_S = 1.0
"""A new step waits this long for a save that still waits for other open steps. Shorter: threads that step in turn can
keep a save out for good. Longer: where the open step waits for the new one, both stand still for longer."""

STEP_PATIENCE_S = 60.0
"""After this, a save and a step that wait for each other count as a deadlock, and the save fails. Shorter would fail
saves during long steps; longer leaves a deadlocked training silent."""

# Verdicts (capture/): version counters, which the thread that called save() must confirm.

VERDICT_FIRST_LOOK_S, VERDICT_LAST_LOOK_S = 0.005, 0.1
"""Between two requests for a verdict; doubles from the first to the last. Training usually answers within a step. Each
request makes the main thread read all counters, so more requests slow it; fewer delay the publication."""

VERDICT_BEFORE_WRITE_S = 0.2
"""``wait_captured()`` asks another thread this long for its verdict, because its caller is about to write. Shorter
fails checkpoints that one more moment would have saved; longer holds up the caller while the other thread computes."""

VERDICT_AT_EXIT_S = 5.0
"""At exit, daemon threads and threads of other languages get this long to give their verdict; Python does not join
them. Longer holds up the exit, and a cluster soon sends SIGKILL."""

VERDICT_PATIENCE_S = 30.0
"""``result()`` waits this long for a checkpoint that lacks only another thread's verdict, then raises: that thread may
be waiting for this one. Shorter raises while the other thread runs one long operation."""

# Handles and background threads (pipeline/, shards.py).

HANDLE_LOOK_S = 1.0
"""Between two looks of a thread that waits for a handle: for a missing verdict, and to redraw the progress bar. The
handle itself ends the wait at once."""

PROGRESS_BAR_AFTER_S = 3.0
"""A wait shorter than this shows no progress bar: it would only flicker."""

ABORT_LOOK_S = 2.0
"""Between two looks whether another rank has aborted, while this one copies and writes. Each look is one message to the
store; a later look only writes bytes for nothing."""

FOLDER_LOOK_S = 0.2
"""Between two looks whether an integration has given up a shard whose folder is not known yet. Until then the shard
holds the staging buffer. The folder itself ends the wait at once."""

UNBEGUN_S = 120.0
"""DCP calls ``stage()`` and later ``write_data()``. If the second call has not come after this long, the staged save is
given up and frees the staging buffer. Planning and the ranks' barrier lie between the two, so it must exceed both."""

SIGNAL_FIRST_LOOK_S, SIGNAL_LAST_LOOK_S = 0.05, 5.0
"""After a save that a signal asked for, the signal is sent again until the main thread notices; a signal that arrives
just before a system call does not end that call. Doubles: the first repeats catch the race, the later ones only wait
for a main thread that is inside a long operation."""

# Ranks (ranks/, pipeline/sharded/). Times that a user should scale are multiples of ``rank_timeout_s``.

PULSES_PER_TIMEOUT = 8
"""A rank gives a sign of life this often within ``rank_timeout_s``. Fewer let one late message look like a death; more
load the store, since every rank sends them."""

ABSENT_TIMEOUTS = 5
"""A rank that lives must reach a save that others wait for within so many ``rank_timeout_s``: it may be evaluating or
downloading. Longer lets ranks wait for one that hangs in training."""

PULSE_STOP_S = 5.0
"""``close()`` waits this long for a sign of life that is under way. Shorter could delete the key before the last sign
sets it again; longer holds up the end when the store is gone."""

FIRST_REMINDER_S, REMINDER_GROWTH = 5.0, 4
"""The first warning that names missing ranks, and how much longer each further one takes (5, 20, 80 s …). Ranks that
start within seconds of each other cause no warning, and a long wait does not flood the log."""

RENDEZVOUS_LOOK_S = 0.25
"""Between two looks whether a rank waits in vain for others to join. Each look is two messages to the store of
training."""

ALONE_GRACE_S = 10.0
"""A rank that has saved whole checkpoints by itself gives up that claim when it joins the others. If the claim is
still there after this long, the ranks that wait refuse it. Shorter refuses a rank that only shards its model later."""

STRAYED_PATIENCE_S = 10.0
"""``save()`` waits this long, at most ``rank_timeout_s``, for rank 0 to begin the step that this rank saves. The ranks
train in step, so rank 0 is at most a step away; training waits meanwhile."""

STRAYED_LOOK_S = 0.005
"""Between two looks whether rank 0 has begun that save. It blocks training, so it is short."""

FAREWELL_S = 5.0
"""At the end rank 0, whose process may serve the store, waits this long, at most ``rank_timeout_s``, until the others
have read the outcome of the last save. Without it they look into the folder, which takes longer on a network file
system."""

FAREWELL_LOOK_S = 0.05
"""Between two of its looks; the others usually read within milliseconds."""

OUTCOME_FIRST_LOOK_S, OUTCOME_LAST_LOOK_S = 0.05, 1.0
"""Between two looks whether a save was aborted, while a rank waits for an answer of another one; doubles. Shorter loads
the store, longer keeps ranks in a save that has already failed. The answer itself ends the wait at once."""

LOOKOUT_S = 1.0
"""Between two looks for lost ranks, while a rank waits in a collective of training's process group. Each look is up to
nine messages to the store; a later look only lets ranks wait in vain for longer."""

BROADCAST_FIRST_LOOK_S, BROADCAST_LAST_LOOK_S = 0.0001, 0.002
"""Between two looks whether a broadcast has ended; doubles. Shorter takes processor time from the broadcast itself,
longer adds to each."""

SLOT_FIRST_LOOK_S, SLOT_LAST_LOOK_S = 0.00005, 0.001
"""Between two looks at the counters of a rank that fills or takes shared memory; doubles. A slot takes about half a
millisecond. Shorter takes processor time from the copies."""

JOIN_FIRST_LOOK_S, JOIN_LAST_LOOK_S = 0.001, 0.1
"""Between two looks whether rank 0 has opened its Checkpointer; doubles. The ranks usually open theirs within
milliseconds; after that a tenth of a second does not matter."""

STORE_FIRST_LOOK_S, STORE_LAST_LOOK_S = 0.0005, 0.02
"""Between two looks for a key of a store that cannot wait (FileStore, HashStore); doubles. Every vote takes several
such waits, one after the other, so a longer pause shows in the time of a save."""

# Storage (storage/, ranks/group.py).

STALE_NAME_S = 65.0
"""A node may remember for this long what a name of a network file system was, or that it was missing: NFS keeps folder
attributes for up to 60 s (``acdirmax``). Shorter, and a rank could take a published checkpoint for aborted."""

SHARED_NAME_LOOK_S = 0.05
"""Between two looks whether a staged folder was published; each is a few calls of the file system."""

OWNER_LOOK_S = 0.2
"""Between two looks for the owner file that rank 0 has just written, on a network file system; each lists the folder,
from all nodes at once."""

READ_RETRIES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Before each retry of a read that the operating system failed: three seconds together, which a failover of a network
file system often takes. Longer holds up a restart that will not succeed anyway."""

CTIME_TICK_S = 0.001
"""Between two attempts to give a folder a newer ctime; kernels count ctime in steps of 1 to 10 ms."""

# Observation (observe/trace_file.py, tools/bench.py).

TRACE_FLUSH_S = 1.0
"""The longest time that an event of the trace stays in memory; a killed process loses these events. Shorter costs
more system calls on a background thread."""

BENCH_LAST_ROUND_S = 15.0
"""``lazyckpt bench`` begins no further round after this: on a slow disk a user gets fewer rounds instead of a wait."""

STORE_CONNECT_S = 10.0
"""How long a connection to an object store may take. Then the request begins anew."""

STORE_SILENCE_S = 20.0
"""How long an object store may send nothing in an answer. Shorter, and a store under load would lose requests that it
is about to serve."""

STORE_REQUEST_S = 600.0
"""How long one request to an object store may take: 8 MiB at 14 kB/s."""

STORE_RETRIES_S = 30.0
"""How long one request to an object store is tried again. Longer pauses are those between uploads."""

MIRROR_FIRST_PAUSE_S = 1.0
MIRROR_LONGEST_PAUSE_S = 300.0
"""Between a failed upload and the next try; each pause is twice as long as the one before."""

MIRROR_FIRST_LOOK_S, MIRROR_LAST_LOOK_S = 0.05, 5.0
"""Between two looks of a rank at what the others have uploaded; doubles. Rank 0 lists the objects of one checkpoint,
each other rank asks the store of training for one key. Longer only delays the commit of an upload."""

MIRROR_PATIENCE_S = 60.0
MIRROR_SLOWEST_BYTES_PER_S = 20e6
"""Rank 0 uploads the files of a rank that lives and has not uploaded them after this long, and the time that so many
bytes take at this speed, or at the mirror's ``max_bytes_per_s`` if that is slower. Shorter uploads them twice, longer
leaves a checkpoint without its commit while one rank hangs."""

MIRROR_SILENCE_S = 10.0
"""How long restore() waits for a mirror that says nothing, while another place has a checkpoint. Shorter could pass
over a loaded store that has a newer one; longer holds up every restart while one mirror is away."""
