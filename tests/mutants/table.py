"""The promises of README.md, docs/durability.md, docs/consistency.md and SECURITY.md, each with mutants that break it.

A mutant says what goes wrong, where its safety stands, how to take it out, and which tests must notice. A promise has
one mutant, the subtlest; it has another only for a second mechanism that could break alone. One file, because the
promises are read and counted as one list.
"""

from __future__ import annotations

from mutants import Mutant, Promise
from mutants.anchors import Change, Native, Python, body, never_raises, swap

MUTANTS: list[Mutant] = []

README, DURABILITY, RANKS = "README.md", "docs/durability.md", "docs/many-ranks.md"
CONSISTENCY, SECURITY, SETTINGS = "docs/consistency.md", "SECURITY.md", "docs/settings.md"
MIRRORS = "docs/mirrors.md"
LIGHTNING, ACCELERATE = "docs/lightning.md", "docs/accelerate.md"


def promise(document: str, text: str, *mutants: tuple[str, Python | Native, str]) -> None:
    MUTANTS.extend(Mutant(Promise(text, document), *mutant) for mutant in mutants)


def py(anchor: str, change: Change) -> Python:
    return Python(anchor, change)


def cc(anchor: str, old: str, new: str = "") -> Native:
    return Native(anchor, old, new)


def attacks(*names: str) -> str:
    return " ".join(f"attacks/test_attacks.py::test_no_one_gets_in[{name}]" for name in names)


ORDER = "test_commit.py::test_the_order_of_syncs_and_renames test_faults.py::test_every_call_of_the_commit_fails"
EVERY_OPERATION = "test_faults.py::test_every_operation_of_a_save_fails"
PASSING = "test_faults.py::test_passing_troubles_are_overcome"
SWEEP = "test_commit.py::test_sweep_spares_the_living_and_takes_the_dead"
IMAGES = "crash/test_crash_images.py::test_every_crash_image"
CRASHES = "test_in_place.py::test_a_crash_leaves_one_checkpoint_or_none_that_loads"
WAITS = "test_gate.py::test_a_step_waits_for_what_it_changes"
TORN = "test_snapshot.py::test_a_write_between_save_and_step_fails_the_checkpoint_and_names_the_tensor"
DECISION = "test_decision.py"
KEPT_SHARES = "test_kept_shares.py"
LIVE_STATE = "test_live_state.py"
PLANNED_AGAIN = "test_planned_again.py::test_what_is_kept_between_saves_changes_no_byte[0]"
OTHER_WAYS_IN = "test_other_ways_in.py::test_a_safetensors_file_is_kept_for_the_same_facts"
NATIVE_PICKLER = "test_planned_again.py::test_the_native_pickler_writes_what_python_writes"
WITNESS = "test_page_witness.py::test_a_write_to_any_watched_page_fails_the_checkpoint"
VERIFY = (
    "test_cli.py::test_verify_names_the_damaged_record_and_its_tensor "
    "test_cli.py::test_verify_of_damage_outside_the_records"
)
EVERY_ORDER = "test_votes.py::test_two_ranks_keep_every_promise_in_every_order_of_events"
SHARED = "test_shared.py"
STAGED = "test_staged.py"
TOGETHER = "ranks/test_together.py"
CREW_FAULTS = "test_crew_faults.py"
KILLED = "ranks/test_torture.py::test_a_rank_that_is_killed_at_any_operation_breaks_no_checkpoint"
LIGHTNING_DDP = "test_lightning_ddp.py"
DEVICES = "test_cuda.py gpu/test_training.py"
BEHIND_THE_CALL = "test_instant.py::test_a_write_to_eager_bytes_behind_the_call_that_takes_them_is_in_no_checkpoint"
INSTANT = "test_instant.py::test_a_signal_handler_that_writes_inside_save_gives_one_moment_or_an_error"
SHARED_MEMORY = "test_shared_memory.py"
CLOSURES = "test_closures.py"
NEWS = "integrations/test_lightning_news.py"
RESUMES = "integrations/test_lightning_resume.py::test_every_way_to_run_an_epoch_goes_on_in_the_same_bits"
OF_RANKS = "integrations/test_lightning_resume_ranks.py::test_each_rank_goes_on_with_its_own_numbers_and_data"
ROUND_TRIPS = "test_round_trips.py::test_what_could_not_be_restored_is_not_saved"
EVALUATED = "ranks/test_evaluated.py::test_an_evaluation_before_changes_nothing"


# Durable, and whole or not there

promise(
    README,
    "A handle resolves after fsync of the file, rename, fsync of the folder.",
    ("the manifest is not synced", py("Staging._write_manifest", swap("os.fsync(...)")), ORDER),
    ("the folder above a checkpoint is not synced", py("Staging.publish", swap("sync_path(...)")), ORDER),
    (
        "the folder above a new run is not synced",
        py("make_folder", swap("sync_path(...)")),
        "test_commit.py::test_the_name_of_the_run_itself_is_synced",
    ),
    (
        "a checkpoint is published before its files are durable",
        py("pipeline", swap("job.wait_settled(...)")),
        f"test_faults.py::test_several_in_flight_fail_alone test_faults.py::test_a_lone_file_fails {EVERY_OPERATION}",
    ),
    (
        "io_uring does not sync",
        cc(
            "UringBackend::Submit",
            "io_uring_prep_fsync(sqe, request.fd, IORING_FSYNC_DATASYNC)",
            "io_uring_prep_nop(sqe)",
        ),
        "test_engine.py::test_what_has_settled_is_on_the_disk",
    ),
)

promise(
    README,
    "kill -9 at any instant leaves the newest committed checkpoint loadable.",
    (
        "a step that is saved again is not exchanged in one call",
        py("Staging._exchange", swap("_engine.rename_exchange(...)", "os.stat(errno.EINVAL)")),
        f"test_checkpointer.py::test_saving_a_step_again_replaces_it_atomically {ORDER}",
    ),
    (
        "a failed publication removes the checkpoint that it replaced",
        py("Staging.discard", swap("not self._published", "True")),
        "test_faults.py::test_a_replaced_checkpoint_outlives_a_failed_publication",
    ),
    (
        "files are removed while a power cut could give them their name back",
        py("unlink", swap("sync_path(...)")),
        "test_commit.py::test_the_final_name_is_gone_for_good_before_what_had_it",
    ),
)

promise(
    DURABILITY,
    "A sweep after a crash spares the staged folders of living processes.",
    (
        "a sweep removes what a living process stages",
        py("_remove_abandoned", swap("fcntl.flock(...)")),
        SWEEP,
    ),
)

promise(
    DURABILITY,
    "Checkpoints appear in the order of their saves.",
    (
        "checkpoints appear in any order",
        py("persist.agree", swap("concurrent.futures.wait(...)")),
        "test_checkpointer.py::test_several_in_flight_commit_in_order",
    ),
)

promise(
    DURABILITY,
    "Every completion is checked; a write that failed fails the checkpoint; a failed sync is never retried.",
    ("a failed write or sync is ignored", py("pipeline", swap("job.raise_error(...)")), EVERY_OPERATION),
    (
        "a short direct write goes on from where it stopped",
        cc("Engine::OnChunkResult", "if (file.direct) chunk->written -= chunk->written % kBlockBytes;"),
        PASSING,
    ),
    (
        "a file may be written over another",
        cc("IoBackend::Create", "O_WRONLY | O_CREAT | O_EXCL", "O_WRONLY | O_CREAT"),
        "test_engine.py::test_a_file_is_created_once_and_never_overwritten",
    ),
)

promise(
    SETTINGS,
    "verify_after_write reads each checkpoint back from the disk before it is committed.",
    (
        "nothing is read back",
        py("pipeline", swap("readback.compare(...)")),
        "test_readback.py::test_a_write_that_was_lost_fails_the_save "
        "test_readback.py::test_a_checkpoint_that_was_lost_is_not_committed",
    ),
)

promise(
    DURABILITY,
    "A folder that cannot be renamed holds the old checkpoint or the new one, or its weights are missing.",
    ("the old weights stay while new files come", py("in_place._give_names", swap("(_ / _).unlink(...)")), CRASHES),
    ("the steps of a publication in place are not synced", py("in_place._give_names", swap("sync()")), IMAGES),
    (
        "a folder of a lower layer is removed weights last",
        py("take_apart", swap("((MANIFEST,), _WEIGHTS, _)", '(("",),)')),
        "test_overlay.py::test_a_crash_in_a_removal_leaves_nothing_that_loads "
        "test_overlay.py::test_a_manifest_is_gone_for_good_before_anything_else_goes",
    ),
)

promise(
    DURABILITY,
    "Retention never leaves fewer than keep_last whole checkpoints, and removes only after a commit.",
    (
        "a failed checkpoint lets old ones go",
        py("pipeline.background", swap("error is None", "True")),
        "test_checkpointer.py::test_nothing_is_removed_when_a_save_fails",
    ),
    (
        "retention does not fill up a short chain",
        py("retention", swap("whole < keep_last", "whole < keep_last and c in on_chain")),
        "test_checkpointer.py::test_a_run_that_goes_on_from_elsewhere_keeps_as_many_as_it_should",
    ),
    (
        "retention removes what another process saved",
        py("Lineage.superfluous", swap("(_, _) in self._ours", "True")),
        "test_checkpointer.py::test_two_that_save_into_one_folder",
    ),
)

promise(
    DURABILITY,
    "The end of a script commits what was saved; an interrupted save is committed or discarded.",
    (
        "close() does not wait",
        py("Background.drain", swap("wait_for(...)")),
        "test_checkpointer.py test_saver.py",
    ),
    (
        "an interrupted save is published",
        py("Launcher._withdraw", swap("job.fail(...)")),
        "test_checkpointer.py::test_an_interrupted_save_is_not_published_and_nothing_hangs",
    ),
)

promise(
    DURABILITY,
    "commit_on commits the pending saves before the process ends.",
    (
        "commit_on does not wait for the commit",
        py("CommitOnSignal._commit", swap("wait_for(...)")),
        "test_preemption.py::test_a_handler_that_was_there_before_is_called_after_the_commit",
    ),
)

promise(
    DURABILITY,
    "A forked child cannot use what its parent opened.",
    (
        "a forked child uses the Saver of its parent",
        py("Launcher.check_process", never_raises("ClosedError")),
        "test_checkpointer.py::test_use_in_a_forked_child",
    ),
    (
        "a forked child has a part in the job of its parent",
        py("meeting._disown", body("return")),
        "test_crew_faults.py::test_a_forked_child_neither_hangs_nor_ends_the_job_of_its_parent",
    ),
)

promise(
    DURABILITY,
    "A call inside save() or restore(), by a signal handler or another thread, is refused and never hangs.",
    (
        "a signal handler saves inside a save",
        py("reentry.refuse", never_raises("ConfigError")),
        "test_interrupts.py::test_what_a_state_dict_calls_inside_save_and_restore_is_refused",
    ),
    (
        "a second thread saves inside a save",
        py("reentry.alone", never_raises("other_thread")),
        "test_interrupts.py::test_a_second_thread_is_refused_inside_a_call_and_served_after_it",
    ),
)

# Many ranks

promise(
    DURABILITY,
    "All ranks commit a checkpoint, or none does, and all give the same answer.",
    (
        "a rank that gives up aborts without the rename",
        py("_settle_by_folder", swap("folder.to_trash(...)", "True")),
        EVERY_ORDER,
    ),
    (
        "a rank believes its node that the final name is missing",
        py("SharedFolder.is_published", swap("os.path.lexists(...)", "True")),
        "storage/test_shared.py::test_a_node_that_remembers_that_the_name_was_missing_finds_the_checkpoint",
    ),
    (
        "a rank takes an older file for the one that was staged",
        py("SharedFile._has_final_name", swap("os.path.samestat(...)", "self._target.exists()")),
        "storage/test_shared.py::test_a_lone_file_that_is_given_up_leaves_the_old_one",
    ),
    (
        "a rank takes a newer file with the inode number of the one that was staged for that one",
        py("SharedFile.__init__", swap("weakref.finalize(...)", "locks.drop(opened)")),
        "storage/test_shared.py::test_a_newer_file_with_the_inode_number_of_the_staged_one_is_not_taken_for_it",
    ),
    (
        "a rank votes before its files have durable names",
        py("SharedRequest.agree", swap("self._staging.sync(...)")),
        STAGED,
    ),
    (
        "a rank votes before its file beside that of all ranks has a durable name",
        py("TogetherRequest.agree", swap("self._staging.sync(...)")),
        KILLED,
    ),
    (
        "rank 0 publishes checksums that are not durable",
        py("ReplicaFile.complete", swap("os.fdatasync(fd)")),
        KILLED,
    ),
)

promise(
    DURABILITY,
    "An older start of a job publishes nothing once a newer one has opened the folder.",
    (
        "a job whose folder another one has taken publishes",
        py("Ballot.decide", swap("folder.taken_by(...)")),
        "test_votes.py::test_an_older_generation_publishes_nothing_once_a_new_one_has_read_the_folder",
    ),
    (
        "a start that has slept takes the folder from a newer one",
        py("claim.take", never_raises("OSError")),
        "test_group.py::test_a_start_that_slept_before_it_took_the_folder_leaves_it_to_a_newer_one",
    ),
)

promise(
    DURABILITY,
    "A sweep removes no folder of a job that is not proven dead, and everything of an older start of the same job.",
    ("a lock on another node proves death", py("claim.is_abandoned", swap("is_local(...)", "True")), SHARED),
    (
        "an older start of the job keeps its folder",
        py("claim.is_abandoned", swap("found.generation < by.generation", "False")),
        SHARED,
    ),
    ("a replaced checkpoint is not recovered", py("removal.put_back", swap("os.rename(...)")), SHARED),
)

promise(
    RANKS,
    "Ranks that save or restore different things are refused, and both are named.",
    (
        "ranks save different things together",
        py("Ballot.staged_name", swap("record != self._begin", "False")),
        "test_votes.py::test_ranks_that_save_different_things_are_both_named",
    ),
    (
        "ranks may save into folders of their own",
        py("group._check_same_folder", swap("found is None", "True")),
        "test_group.py",
    ),
    (
        "each rank restores what it was told",
        py("GroupTeam.compare", body("return")),
        "test_crew.py::test_ranks_that_restore_something_else_are_refused",
    ),
    (
        "rank 0's tensor is saved for one of another size",
        py("RankPlan._is_mine", swap("_ != kind_of(shard)", "name_of(path) not in self._cache.elsewhere")),
        "test_crew_faults.py::test_a_tensor_of_another_size_on_another_rank_is_refused_each_time",
    ),
)

promise(
    RANKS,
    "Each rank gets back its own loaders, samplers and datasets.",
    (
        "a loader with a state of its own is rank 0's on all ranks",
        py("provider_for", swap("isinstance(obj, _LOADERS)", "isinstance(obj, TrackedLoader)")),
        "test_own.py::test_every_rank_gets_back_its_own_loaders_samplers_and_datasets",
    ),
)

promise(
    RANKS,
    "The file is `state.pt`, byte for byte what one rank would write, and `torch.load` reads it.",
    (
        "a storage that several ranks write has the checksum of its last part",
        py("file._whole", swap("_engine.crc32_combine(...)", "crc")),
        "test_replicated.py::test_all_ranks_write_the_file_that_one_would_write",
    ),
    (
        "a hole between the parts of ranks is not found",
        py("file._crc_of_file", swap("offset != end", "False")),
        "test_replicated.py::test_receipts_that_leave_a_hole_are_refused",
    ),
    (
        "a rank pads over the bytes of its neighbor",
        cc("Engine::OpenExisting", "aligned && end % kBlockBytes == 0", "aligned"),
        "test_engine.py::test_a_part_that_ends_inside_a_block_is_refused_where_others_write",
    ),
)

promise(
    RANKS,
    "All ranks track the same state in the same order.",
    (
        "ranks that cut the file otherwise write it together",
        py("ReplicaFile.hear", swap('told["identity"] != split.identity', "False")),
        "test_replicated.py::test_a_rank_with_another_state_is_named_with_the_tensor",
    ),
    (
        "ranks with other settings join",
        py("Writers.meet", swap("other != told[0][0]", "False")),
        "test_replicated.py::test_ranks_with_other_writers_are_refused",
    ),
)

promise(
    RANKS,
    "A storage is used only after its checksum was verified.",
    (
        "a rank sends damaged bytes to the others",
        py("Filling._together", swap("compare(...)", "None")),
        f"{TOGETHER}::test_ranks_that_find_a_flipped_bit_all_go_back_to_the_checkpoint_before",
    ),
    (
        "a storage that several ranks read is not verified",
        py("Filling._check", swap("record.crc32 not in (None, crc)", "False")),
        f"{TOGETHER}::test_ranks_that_find_a_flipped_bit_all_go_back_to_the_checkpoint_before",
    ),
)

promise(
    RANKS,
    "if the ranks take different entries of the checkpoint, every rank reads for itself.",
    (
        "ranks read together what not all of them take",
        py("Filling.fill", swap("len({each.wanted for each in described}) == 1", "True")),
        f"{TOGETHER}::test_ranks_that_take_other_entries_read_alone",
    ),
)

promise(
    RANKS,
    "each reads some of the tensors, and the others get them through shared memory.",
    (
        "a replica keeps to itself that the shard it has sent is damaged",
        py("replicas._fill", swap("failure is not None", "False")),
        f"{TOGETHER}::test_replicas_of_a_shard_read_it_once",
    ),
)

promise(
    RANKS,
    "On one machine the bytes pass through shared memory.",
    (
        "a rank overwrites bytes that others have not taken yet",
        py("SharedMemory._await", swap("counters[1 + root] > done - SLOTS", "True")),
        f"{TOGETHER}::test_every_rank_has_the_saved_state_and_has_read_its_share",
    ),
    (
        "a rank of another machine is given the memory of a stranger",
        py("Segment.find", swap("not os.readlink(path).startswith(...)", "False")),
        f"{TOGETHER}::test_memory_of_another_process_is_not_taken_for_the_one_that_was_offered",
    ),
    (
        "ranks that do not all see the memory use it all the same",
        py("Filling._way", swap("all(...)", "True")),
        f"{TOGETHER}::test_ranks_of_two_machines_restore_together",
    ),
)

promise(
    RANKS,
    "A rank that dies is given up after `rank_timeout_s`; the others raise a `RankError` that names it.",
    (
        "the rank that a collective fails on first is named instead of the dead one",
        py("Lookout._cause", swap("isinstance(error, RuntimeError)", "False")),
        f"{TOGETHER}::test_a_rank_that_dies_is_named_on_all_within_the_timeout",
    ),
    (
        "a rank that waits for others does not hear that one of them has failed",
        py("Lookout.look", swap("self._seat.store.look(self._next_exchange.outcome) is not None", "False")),
        f"{TOGETHER}::test_a_rank_that_is_interrupted_is_named_at_once",
    ),
)

promise(
    RANKS,
    "Of buffers, such as the statistics of BatchNorm, rank 0's are saved.",
    (
        "another rank writes its buffers into a safetensors file",
        py("SafetensorsForm.region", swap("nbytes and (not owned)", "False")),
        "test_accelerate_ddp.py::test_both_ranks_write_the_files_and_a_resumed_run_ends_in_the_same_bits",
    ),
)

promise(
    RANKS,
    "A warning on rank 0 names the ranks and the tensors.",
    (
        "replicas that differ are saved without a word",
        py("ReplicaFile._compare", swap("written[part] != crc", "False")),
        "test_replicated.py::test_replicas_that_differ_are_named_and_rank_0_writes_all_until_they_are_equal",
    ),
    (
        "rank 0 does not write all of replicas that differ",
        py("ReplicaCache.told_alone", body("pass")),
        "test_replicated.py::test_replicas_that_differ_are_named_and_rank_0_writes_all_until_they_are_equal",
    ),
    (
        "a rank compares with one other rank only",
        py("ReplicaCache.turn", body("return 0")),
        "test_replicated.py::test_each_rank_compares_with_every_other_one",
    ),
)

promise(
    RANKS,
    "Each rank has its own random states and loaders back, as with sharded state",
    (
        "every rank takes the random state of rank 0",
        py("own.own_state", swap("name not in left and rank != 0", "False")),
        "test_replicated.py::test_a_resumed_run_ends_in_the_same_bits_on_every_rank",
    ),
)

promise(
    DURABILITY,
    "A folder that ranks replace keeps the files of others.",
    (
        "a folder that ranks replace loses the files of others",
        py("SharedStaging.describe", swap("carry_over(...)")),
        SHARED,
    ),
)

promise(
    RANKS,
    "If a rank fails, dies or hangs, every rank gets a RankError that names it and the cause, in time.",
    (
        "a rank waits for ever for one that lives and does not save",
        py("Watch.check", swap("found[self._at.kind] < self._at.number", "False")),
        "test_pulse.py",
    ),
    (
        "a rank that has lost the store of rank 0 blames itself",
        py("Seat.without_store", swap("self.server in (None, self.rank)", "True")),
        "test_crew_faults.py::test_a_rank_0_that_dies_with_the_store_is_named",
    ),
    (
        "a rank writes on after another has aborted",
        py("SharedRequest.check", body("pass")),
        f"{CREW_FAULTS}::test_a_rank_in_a_long_write_learns_that_another_has_aborted",
    ),
    (
        "a rank whose disk is full is not named",
        py("SharedRequest.failed", swap("refuse(...)")),
        f"{CREW_FAULTS}::test_a_disk_that_fails_one_rank_fails_that_save_on_all",
    ),
)

promise(
    RANKS,
    "Time in which a process was stopped counts against no rank.",
    (
        "a rank blames others for the time that it slept",
        py("Watch.check", swap("min(_, _)", "now - self._looked")),
        "test_pulse.py",
    ),
)

promise(
    RANKS,
    "A save that one rank leaves out, repeats or refuses costs that checkpoint alone.",
    (
        "a rank that has left out a save stays out of step",
        py("SaveNumbers.find", body("return None")),
        "test_caught.py::test_a_call_that_one_rank_repeats_or_leaves_out_costs_few_checkpoints",
    ),
    (
        "a rank whose save() refused its arguments does not tell that it has gone on",
        py("Crew.give_up_refused", body("pass")),
        f"{CREW_FAULTS}::test_a_rank_that_saves_something_else_is_named_at_once",
    ),
    (
        "a call that raises an earlier failure saves nothing",
        py("Launcher.launch", swap("self._background.has_failed()", "self._background.raise_failed()")),
        "test_caught.py::test_what_fails_on_one_rank_costs_that_checkpoint_alone",
    ),
    (
        "a save() that is repeated with good arguments counts twice",
        py("Crew.give_up_refused", swap("refused[1] != step", "True")),
        f"{CREW_FAULTS}::test_a_call_with_bad_arguments_may_be_repeated_with_good_ones",
    ),
)

promise(
    RANKS,
    "Replicas that all save into one folder are refused on every rank, and so is a rank without shards beside others.",
    (
        "replicas that all save into one folder replace each other's checkpoints",
        py("RankClaims.enter", swap("int(client.claim(...))", "mine")),
        "test_rank_claims.py::test_replicas_that_all_save_into_one_folder_are_refused_on_every_rank",
    ),
    (
        "a rank without shards saves where others save shards",
        py("RankClaims.announce", body("return")),
        "test_rank_claims.py::test_a_rank_without_shards_is_refused_where_others_save_shards",
    ),
)

promise(
    RANKS,
    "A rank that waits for others says so; ranks that draw equal random numbers are told.",
    (
        "a rank waits for others in silence",
        py("Rendezvous.look", swap("self._warn(...)")),
        "test_rendezvous.py",
    ),
    (
        "no rank is told that all draw equal random numbers",
        py("streams.warn_if_equal", body("return")),
        "test_streams.py::test_replicas_that_restore_one_random_state_are_told_how_to_part",
    ),
)

promise(
    RANKS,
    "An evaluation, a forward without backward, changes nothing: neither for save() nor for restore().",
    ("whole parameters stay for restore()", py("_Attempt.restore", swap("reshard(...)")), EVALUATED),
    ("a model with whole parameters is not sharded", py("is_fully_sharded", body("return False")), EVALUATED),
)

# One instant

promise(
    README,
    "Only tensors that a gated optimizer owns are copied later; its step waits for their copy.",
    ("a step does not wait", py("Snapshot._wait", swap("self.job.wait_captured(...)")), WAITS),
    (
        "a step does not wait behind its closure",
        py("hooks._open_step.gated_closure", swap("gate.begin_writing(...)")),
        "test_gate.py::test_a_closure_overlaps_and_then_the_step_waits",
    ),
    (
        "a guarded method does not wait",
        py("Gate.step", swap("self.begin_writing(...)")),
        "test_gate.py::test_guard_makes_an_average_lazy_and_its_update_wait",
    ),
    (
        "schedule-free optimizers switch without waiting",
        py("hooks._open_step", swap("guard_switches(...)")),
        "test_switching.py::test_a_save_between_eval_and_train_commits",
    ),
    (
        "a storage gives back memory that is being copied",
        py("Snapshot.wait_for_storage", swap("self.job.wait_captured(...)")),
        "test_snapshot.py::test_a_storage_lets_go_of_its_memory_when_that_is_copied",
    ),
    (
        "wait_captured() of a handle returns before the copies",
        cc("Engine::OnCopied", "source.parts_left == 0", "true"),
        "test_engine.py::test_checksum_waits_for_a_source_that_another_thread_copies",
    ),
)

promise(
    CONSISTENCY,
    "Optimizer steps wait at the gate, whatever writes before their closure.",
    ("a proof outlives what it rests on", py("Proof.holds", body("return True")), CLOSURES),
    ("an argument that is passed on is the closure", py("_Walk._passes_on", body("return True")), CLOSURES),
    ("every hook is one of ours", py("foreign._is_ours", body("return True")), CLOSURES),
)

promise(
    CONSISTENCY,
    "All bytes of tensors are of one moment, and save() raises if an object in the pickle is older.",
    (
        "eager bytes are copied after the call that watches lazy ones",
        cc("Engine::Capture", "CopyEager(*job, Clock::now() + kPatience)", "false"),
        BEHIND_THE_CALL,
    ),
    ("signals are not heard", py("Instant.was_interrupted", body("return False")), INSTANT),
    (
        "a step inside save() is not seen",
        py("Exclusion.stepped_inside", body("return None")),
        "test_instant.py::test_a_step_inside_save_on_its_own_thread_fails_the_save_and_the_next_one_commits",
    ),
)

promise(
    CONSISTENCY,
    "Shared memory is copied before save() returns, also where torch does not know that it is shared.",
    ("only memory that torch shares is shared", py("shared._look_at", swap("_overlaps(...)", "False")), SHARED_MEMORY),
)

promise(
    CONSISTENCY,
    "Eager tensors are copied before save() returns.",
    (
        "save() does not wait for eager bytes",
        py("_launch", swap("job.wait_eager(...)")),
        "test_gate.py::test_buffers_that_change_in_forward_are_eager test_saver.py",
    ),
    (
        "an optimizer that did not step since the last save is lazy",
        py("Owners", swap("steps != steps_before.get(...)", "True")),
        "test_gate.py::test_a_second_save_without_a_step_is_eager",
    ),
    (
        "a parameter without a gradient is lazy",
        py("Ownership._eager", body("return []")),
        "test_evidence.py",
    ),
    (
        "a storage of which an optimizer owns a part is lazy",
        py("ownership._covered", body("return 1 << 62")),
        "test_snapshot.py::test_a_part_of_a_storage_is_eager_unless_the_parts_make_the_whole",
    ),
)

promise(
    CONSISTENCY,
    "A save keeps what the save before decided only while every fact that it was decided by is the same.",
    (
        "what the owners have is not compared",
        py("Decisions.decide", swap("facts == facts_then", "facts[2] == facts_then[2]")),
        DECISION,
    ),
    (
        "the storages of the checkpoint are not compared",
        py("Decisions.decide", swap("facts == facts_then", "facts[0] == facts_then[0]")),
        DECISION,
    ),
    (
        "evidence that another Saver dropped is still believed",
        py("Evidence.without", swap("wanted.isdisjoint(...)", "True")),
        DECISION,
    ),
    (
        "a write to a frozen parameter goes unseen",
        py("Frozen.facts", body("return [storages.seen for storages in self._storages]")),
        DECISION,
    ),
    (
        "a storage without an owner may become one that has an owner",
        py("Decisions._moved", swap("identity in last.places", "False")),
        DECISION,
    ),
    (
        "tensors are not compared by their memory",
        cc("Seen::Add", "facts.data", "0"),
        DECISION,
    ),
    (
        "a negated tensor is pickled as a plain one",
        cc("Writer::SaveTensor", "facts.is_altered ||"),
        NATIVE_PICKLER,
    ),
    (
        "the attributes of a tensor are not pickled",
        cc("HasAttributes", "return Truth(", "return false && Truth("),
        "test_tensors.py",
    ),
)

promise(
    CONSISTENCY,
    "What a save keeps from the save before changes no byte of a checkpoint.",
    (
        "a pickle is kept although the object changed",
        py("Skeleton.opcodes_of_plain", swap("now.is_same(...)", "True")),
        PLANNED_AGAIN,
    ),
    (
        "the columns of storages are kept although these are of other kinds",
        py("Skeleton._kept_again", swap("now.has_same_storages(...)", "True")),
        PLANNED_AGAIN,
    ),
    (
        "storages are taken for those of the save before",
        py("Skeleton._kept_again", swap("now.has_same_memory(...)", "True")),
        PLANNED_AGAIN,
    ),
    (
        "a storage that two objects share is written twice",
        py("StorageTable._fits_as_before", swap("_.isdisjoint(...)", "True")),
        PLANNED_AGAIN,
    ),
    (
        "the facts of tensors in other objects are not compared",
        py("Skeleton._opcodes_of_any", swap("facts == self._facts", "True")),
        "test_planned_again.py::test_what_python_pickles_is_pickled_anew_when_it_changes",
    ),
    (
        "what surrounds tensors in other objects is not compared",
        py("Skeleton._opcodes_of_any", swap("outline.opcodes == self.outline", "True")),
        "test_planned_again.py::test_what_python_pickles_is_pickled_anew_when_it_changes",
    ),
    (
        "the layout of other storages is kept",
        py("ArchiveCache.layout", swap("self._layout[0] != facts", "False")),
        PLANNED_AGAIN,
    ),
    (
        "the tensors of a safetensors file are not compared",
        py("SafetensorsCache.again", swap("facts != self._facts", "facts is None")),
        OTHER_WAYS_IN,
    ),
    (
        "tensors of a safetensors file that share memory are not found",
        py("SafetensorsCache.again", swap("len(_) < len(_)", "False")),
        OTHER_WAYS_IN,
    ),
    (
        "a tensor that was copied is taken for one that fills its storage",
        py("SafetensorsCache.keep", swap("_ == list(views.identities)", "True")),
        OTHER_WAYS_IN,
    ),
    (
        "the header of another safetensors file is kept",
        py("SafetensorsCache.layout", swap("self._layout[0] != facts", "False")),
        OTHER_WAYS_IN,
    ),
    (
        "a decision is kept although storages that have owners are elsewhere",
        py("Decisions._moved", swap("memory == last.memory", "True")),
        PLANNED_AGAIN,
    ),
    (
        "a hook of state_dict() is not run",
        cc("Walk::AddPlain", "PyDict_GET_SIZE(hooks) != 0", "false"),
        LIVE_STATE,
    ),
    (
        "code of an instance's own is not run",
        cc("Walk::AddPlain", "In(own.ptr(), method.name) != nullptr", "false"),
        LIVE_STATE,
    ),
    (
        "code of a class's own is not run",
        cc("Walk::LookAt", "!InClass(type, method.name).is(method.torchs)", "false"),
        LIVE_STATE,
    ),
    (
        "a class that was patched later is taken for torch's",
        cc("Walk::VersionIn", "known.tag != TagOf(type)", "false"),
        LIVE_STATE,
    ),
    (
        "a buffer that is not persistent is saved",
        cc("Walk::AddTensors", "PySet_Contains(passing, name) != 0", "false"),
        LIVE_STATE,
    ),
    (
        "what a mode would do to a tensor is not done",
        cc("LiveState", "Truth(torch.function_modes())", "false"),
        LIVE_STATE,
    ),
    (
        "a parameter is pickled as one that needs a gradient",
        cc("Writer::SaveTensor", "&& !how_.is_detached ?", "?"),
        LIVE_STATE,
    ),
    (
        "keys that load_state_dict() would refuse are saved",
        py("ModuleProvider.refuse_untakable", swap("_ == self._accepted_keys", "self._accepted_keys is not None")),
        PLANNED_AGAIN,
    ),
    (
        "where the parts of sharded tensors lie is not compared",
        py("rank_plan._facts_of", swap("value._spec", "None")),
        KEPT_SHARES,
    ),
    (
        "the parts that this rank holds are not compared",
        py("RankCache.written", swap("_looks_of(...) != share.looks", "False")),
        KEPT_SHARES,
    ),
    (
        "what rank 0 writes is not compared",
        py("RankCache.written", swap("self.elsewhere", "None")),
        KEPT_SHARES,
    ),
    (
        "the places of other shards are kept",
        py("ShardCache.laid_out", swap("all(...)", "True")),
        KEPT_SHARES,
    ),
    (
        "a number of more than 64 bits is cut",
        cc("Writer::SaveInteger", "overflow == 0 &&"),
        NATIVE_PICKLER,
    ),
    (
        "a tuple that holds itself is pickled twice",
        cc("Writer::SaveTuple", "if (memo_.Find(tuple)) return false;"),
        NATIVE_PICKLER,
    ),
    (
        "one memory is saved as two dtypes",
        cc("Writer::SaveTensor", "pickle.storages[*known].dtype != dtype.storage_dtype", "false"),
        NATIVE_PICKLER,
    ),
)

promise(
    CONSISTENCY,
    "While save() runs, optimizer steps on other threads wait.",
    (
        "a save does not wait for the step of another thread",
        py("_writing_elsewhere", body("return None")),
        "test_gate_threads.py::test_a_save_waits_for_the_step_of_another_thread",
    ),
    (
        "a step does not wait for a save of another thread",
        py("_armed_elsewhere", body("return None")),
        "test_gate_threads.py::test_who_would_write_during_a_save_waits_until_it_has_what_it_needs",
    ),
)

promise(
    CONSISTENCY,
    "The kernel watches host memory: every write before the copy fails the checkpoint and names the tensor.",
    (
        "written pages are not looked for",
        cc(
            "PageWitness::CheckAndOpenRun",
            "!PageRange::Common(run, piece.pages()).empty()",
            "run.empty()",
        ),
        WITNESS,
    ),
    (
        "eager bytes that do not fit into the ring are not watched",
        cc("Engine::HasRoomForEager", "std::exchange(lazy_bytes, 0)", "0"),
        "test_capture.py::test_eager_bytes_that_wait_for_a_lazy_checksum_need_room_for_lazy_bytes",
    ),
    (
        "a third snapshot keeps the evidence for the first alone",
        cc(
            "PageWitness::Share",
            "theirs.written = !other.IsDone(theirs, page);\n      return true;",
            "theirs.written = !other.IsDone(theirs, page);\n      return false;",
        ),
        "test_page_witness.py::test_a_write_tears_every_snapshot_that_began_before_it",
    ),
)

promise(
    CONSISTENCY,
    "Nothing but a write fails a checkpoint: no read, no page that the kernel moves.",
    (
        "pages that migrate lose their protection",
        cc("Uffd::ProtectMigrating", "return WriteProtect({run.start, run.end}, true);", "return 0;"),
        "test_migration.py::test_a_page_that_migrates_while_it_is_protected_is_not_torn",
    ),
    (
        "a huge page is opened when the first piece of it is copied",
        cc("PageWindow::Openable", "all || room->to_copy == 0", "all || room->begin != 0"),
        "test_huge_pages.py::test_huge_pages_are_made_after_a_save_and_stay_whole",
    ),
)

promise(
    CONSISTENCY,
    "Elsewhere torch's version counters are compared when the saving thread is known to write nothing.",
    (
        "a torn snapshot is published",
        py("pipeline", never_raises("TornSnapshotError")),
        TORN,
    ),
    (
        "writes through a wrapper subclass are missed",
        py("Ownership", swap("self.links.setdefault(...).extend(through)")),
        "test_wrappers.py::test_a_write_outside_of_a_step_fails_the_checkpoint_and_names_the_tensor",
    ),
    (
        "another thread gives the verdict of the one that saved",
        py("Snapshot.verify_soon", swap("self.verdict.is_owed_by_another()", "False")),
        "test_verdict.py::test_wait_captured_on_another_thread_does_not_speak_for_this_one",
    ),
    (
        "the verdict is given inside a backward pass",
        cc("InsideAnOperation", "ask.graph_task().cast<int64_t>() != -1 ||"),
        "test_verdict.py::test_nothing_is_published_inside_an_operation[in_backward]",
    ),
    (
        "the verdict is given inside a custom function",
        cc("InsideAnOperation", "if (PySet_Contains(codes.ptr(), code.ptr()) != 0) return true;"),
        "test_verdict.py::test_nothing_is_published_inside_an_operation[in_a_custom_forward]",
    ),
    (
        "the verdict is given inside a custom function of torch 2.15",
        py("custom_functions", swap("type.__subclasses__(kind)", "[]")),
        "test_verdict.py::test_where_custom_functions_are_native_their_codes_tell",
    ),
)

promise(
    CONSISTENCY,
    "After a torn checkpoint, the next save copies the torn storages before it returns.",
    (
        "a torn storage stays lazy",
        py("Snapshot._tear", swap("self._torn_storages.add(...)")),
        "test_torn.py::test_the_next_save_copies_all_and_later_ones_what_was_torn",
    ),
)

# CUDA devices

promise(
    README,
    "State on CUDA devices is copied on streams of its own, and it is the GPU that waits.",
    (
        "copies do not wait for training",
        cc(
            "CudaDevice::CopyAfter",
            "status = Call(driver_->cuStreamWaitEvent, lane, mark_, CU_EVENT_WAIT_DEFAULT)",
            "(void)lane",
        ),
        DEVICES,
    ),
    (
        "training does not wait for copies",
        cc(
            "CudaDevice::RunAfterCopies",
            "status = Call(driver_->cuStreamWaitEvent, Stream(stream), mark_, CU_EVENT_WAIT_DEFAULT)",
            "(void)stream",
        ),
        DEVICES,
    ),
    ("restore() writes to what training still reads", cc("ReadInto", "e.CopyAfter(current)", "Status::Ok()"), DEVICES),
    (
        "a replay of a CUDA graph does not wait",
        py("CUDAGraph.replay", swap("gate.step(...)", "contextlib.nullcontext()")),
        DEVICES,
    ),
)

promise(
    README,
    "No copy is made on the GPU.",
    (
        "weights are converted on the GPU",
        py("_convert", swap("to_host(...)", "value.detach()")),
        "providers/test_casting.py::test_what_is_converted_at_once_is_copied_to_the_host_before",
    ),
    (
        "a view becomes dense on the GPU",
        py("in_front", swap("to_host(tensor)", "tensor")),
        "providers/test_casting.py::test_views_are_made_dense_in_host_memory",
    ),
)

promise(
    "docs/architecture.md",
    "A graph that is being captured stays whole. The driver's queue is not filled.",
    (
        "an engine that ends on a capturing thread spoils the capture",
        cc("CudaDevice::InsideAnyCapture", "CU_STREAM_CAPTURE_MODE_RELAXED", "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"),
        "test_cuda.py::test_an_engine_that_ends_on_a_capturing_thread",
    ),
    (
        "the driver's queue is filled",
        cc("Engine::TakeChunk", "l.calls + chunk->calls > kCallsAhead", "false"),
        "test_cuda.py::test_a_drivers_queue_is_not_filled",
    ),
)

promise(
    CONSISTENCY,
    "A wait on the host covers the eager bytes of devices too, so that any stream may write.",
    (
        "a wait on the host skips eager bytes on devices",
        cc(
            "Engine::WaitCaptured",
            "return job.captured(owners);",
            "const size_t eager = std::exchange(job.eager_landing, 0);"
            "const bool lazy_done = job.captured(owners);"
            "job.eager_landing = eager; return lazy_done;",
        ),
        DEVICES,
    ),
)

# Checksums

promise(
    README,
    "A flipped bit is found by lazyckpt.load, restore(), lazyckpt verify and unzip -t.",
    (
        "a record's checksum is not compared",
        py("ranges.compare", swap("bad", "False")),
        "test_functional.py::test_a_damaged_record_is_named "
        "test_restore.py::test_a_damaged_newest_is_passed_over_with_a_warning_that_names_the_reason",
    ),
    (
        "the checksum of the pickle is not compared",
        py("FileReader.read_record", swap("record.crc32 not in _", "False")),
        "test_archive.py::test_a_damaged_pickle_is_found_by_its_checksum",
    ),
    (
        "the checksums of a small archive are not compared",
        cc("ReadRecord", "Crc32(0, a.data.data() + data, size) != crc", "false"),
        "test_small_archive.py::test_a_changed_archive_is_refused_unless_the_careful_reader_takes_it "
        "test_shards.py::test_every_bit_of_an_object_is_checked",
    ),
    ("verify compares no record", py("checksums.compare", swap("r.crc32 != crc", "False")), VERIFY),
    (
        "a checksum is of the source, which may change before it is copied",
        cc("StreamBlock", "Crc32(crc, copy.data(), kStrideBytes)", "Crc32(crc, from, kStrideBytes)"),
        "test_engine.py::test_a_checksum_is_that_of_the_copy_whoever_writes_to_the_source_meanwhile",
    ),
)

promise(
    DURABILITY,
    "A changed manifest is found.",
    (
        "a changed manifest is believed",
        py("manifest._told_by", swap('_["crc32"] != checksum(...)', "False")),
        "test_catalog.py::test_a_manifest_that_was_changed_is_found",
    ),
)

promise(
    DURABILITY,
    "Each part of a sharded tensor has a checksum, and a rank checks what it reads.",
    (
        "a part of a tensor is believed",
        py("segments.read_spans", swap("compare(...)", "None")),
        "test_shards.py::test_every_damaged_byte_of_a_part_is_found test_damaged_parts.py",
    ),
    (
        "an item that is read in one piece is believed",
        py("_read_frames", swap("frame.tail(crc)", "aside[begin + len(frame.head) : end]")),
        "test_shards.py::test_every_bit_of_an_item_is_checked_although_it_is_read_in_one_piece",
    ),
    (
        "the checksum of a segment lacks what another chunk holds of it",
        cc("WriteSegments", "Crc32Combine(crc, cut.crc, cut.size)", "cut.crc"),
        "test_engine.py::test_each_segment_has_its_checksum_wherever_chunks_cut_it",
    ),
)

promise(
    DURABILITY,
    "Files of different saves do not mix.",
    (
        "a .metadata that does not match its checksum is believed",
        py("inventory.unsealed", swap("data != sealed(metadata)", "False")),
        "test_shards.py::test_a_flipped_bit_of_the_metadata_is_found",
    ),
    (
        "a file of another save of the same step is believed",
        py("Stamps.check", swap("_ != self._wanted", "False")),
        "test_crew.py::test_a_file_of_another_save_is_found_although_each_item_is_intact",
    ),
)

promise(
    DURABILITY,
    "restore() passes over a damaged checkpoint, and touches nothing unless everything fits.",
    (
        "a checkpoint that does not fit is restored in part",
        py("reading.restore", swap("_.landings(...)", "[]")),
        "test_restore.py::test_a_changed_model_is_one_error_that_lists_all_and_touches_nothing",
    ),
    (
        "a passing error of the machine counts as damage",
        py("restore._restore_newest", swap("ReadError", "ZeroDivisionError")),
        "test_restore.py::test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged",
    ),
)

promise(
    DURABILITY,
    "The newest checkpoint is the one that was saved last.",
    (
        "the newest checkpoint is the one with the highest step",
        py("Catalog.scan", swap("c.sequence", "c.step")),
        "test_checkpointer.py::test_rollback_the_newest_is_the_last_saved_not_the_highest",
    ),
)

# Bounded, and loud

promise(
    README,
    "One staging buffer, reused by every checkpoint.",
    (
        "a ring that has wrapped overwrites bytes in use",
        cc("Ring::Allocate", "wrapped && offset + size > oldest", "false"),
        "test_ring.py",
    ),
)

promise(
    SETTINGS,
    'max_in_flight and durability="before_step" limit the saves that are not durable yet.',
    (
        "max_in_flight is not heeded",
        py("Background.wait_for_room", swap("self._config.max_in_flight", "1000")),
        "test_checkpointer.py::test_max_in_flight_waits_and_says_how_long",
    ),
    (
        'with durability="before_step" a step does not wait for the disk',
        py("pipeline", swap("snapshot.durable is None", "True")),
        "test_checkpointer.py::test_before_step_makes_the_step_wait_for_the_disk",
    ),
)

promise(
    README,
    "A failed background save raises at the next call, naming step, path and cause.",
    (
        "a failure in the background is not told",
        py("pipeline", swap("self._failed.append(...)")),
        EVERY_OPERATION,
    ),
    (
        "a full disk is not found before the copy",
        py("_launch", swap("check_space(...)")),
        "test_checkpointer.py::test_lack_of_space_is_found_before_training_is_blocked",
    ),
)

# Trainers

promise(
    DURABILITY,
    "Lightning's last checkpoint never dangles; no checkpoint goes before the one after it is durable.",
    (
        "a link points at a checkpoint that is not there yet",
        py("LazyCheckpointIO.link", swap("pending[_].add_done_callback(make)", "make()")),
        "test_lightning_files.py::test_a_link_to_the_last_never_dangles",
    ),
    (
        "Lightning removes a checkpoint before the next one is durable",
        py("LazyCheckpointIO.remove_checkpoint", swap("saver.remove(...)", "super().remove_checkpoint(path)")),
        "test_lightning_files.py::test_the_old_checkpoint_stays_until_the_new_one_is_durable",
    ),
)

promise(
    DURABILITY,
    "In Lightning, `on_done` hears of a checkpoint when `last` is durable, too.",
    (
        "a checkpoint is reported before last",
        py("Reports.hold", body("pass")),
        f"{NEWS}::test_a_checkpoint_is_reported_when_last_is_that_of_its_step",
    ),
)

promise(
    LIGHTNING,
    "The file appears when the parts of all ranks are durable, or not at all: if one rank fails, every rank raises "
    "`SaveError`",
    (
        "a rank that has not seen the failure yet saves on alone",
        py("lightning_ranks.raised_on_all", swap("strategy.reduce_boolean_decision(...)", "failure is not None")),
        f"{LIGHTNING_DDP}::test_a_failure_that_only_another_rank_has_seen_is_raised_here_before_the_next_save",
    ),
    (
        "each rank saves under the name that its own metrics give",
        py("lightning_ranks.save_together", swap("strategy.broadcast(filepath)", "filepath")),
        f"{LIGHTNING_DDP}::test_all_ranks_save_under_the_name_that_rank_0_gives",
    ),
)

promise(
    LIGHTNING,
    "Another strategy, one with a `save_checkpoint` of its own, an optimizer whose state is divided among the ranks "
    "(ZeroRedundancyOptimizer), and Fabric are refused with a ConfigError.",
    (
        "a strategy of unknown ranks saves together",
        py("lightning_ranks.check", never_raises("ConfigError")),
        f"{LIGHTNING_DDP}::test_what_calls_rank_0_alone_or_has_no_replicas_is_refused",
    ),
    (
        "a part of the state of a divided optimizer is taken for all of it",
        py("lightning_ranks.check_optimizers", never_raises("ConfigError")),
        f"{LIGHTNING_DDP}::test_what_calls_rank_0_alone_or_has_no_replicas_is_refused",
    ),
)

promise(
    ACCELERATE,
    "The main process writes the others, and those that a hook writes or renames.",
    (
        "a rank is asked for a file that the main process alone has",
        py("replicas.write_together", swap("set(names[0]).intersection(...)", "set(names[0])")),
        "test_accelerate_ddp.py::test_files_that_hooks_write_or_leave_out_are_those_of_the_main_process",
    ),
)

promise(
    LIGHTNING,
    "It sees the `ModelCheckpoint` as it was at the save, and the files of that moment are still there.",
    (
        "a logger sees a later moment",
        py("AsItWas.__getattr__", swap("self._then is None", "True")),
        f"{NEWS}::test_a_logger_that_is_told_late_sees_the_moment_of_the_save",
    ),
)

promise(
    LIGHTNING,
    "Its saves wait until the file is durable, so training waits, too.",
    (
        "a subclass does not find its file",
        py("_save_for_readers", swap("io.wait()")),
        f"{NEWS}::test_a_subclass_that_reads_the_file_at_once_finds_it",
    ),
)

promise(
    LIGHTNING,
    "It goes first among `trainer.callbacks` while the Trainer runs, and back to its place afterwards.",
    (
        "callbacks stay reordered",
        py("LazyCheckpointCallback._move_to_the_front", swap("self._undo.callback(move_back)")),
        "integrations/test_lightning_callback.py::test_what_a_user_sees_is_as_it_was_when_a_run_is_over",
    ),
)

promise(
    LIGHTNING,
    "With the plugin, `fit(ckpt_path=…)` goes on where the checkpoint was: with the same batches and the same random "
    "numbers, whatever the seed of the resumed run.",
    (
        "random numbers stay those of the new seed",
        py("ExactResume.restore_random", swap("self._random.load_state_dict(state)", "None")),
        RESUMES,
    ),
    (
        "the data begin anew",
        py("ExactResume._restore_loaders", swap("tracked.load_state_dict(state)", "None")),
        RESUMES,
    ),
    (
        "a batch that was fetched ahead is left out",
        py("ExactResume._position", swap("len(getattr(_, _, ()))", "0")),
        "integrations/test_lightning_resume.py::test_a_checkpoint_of_any_step_goes_on_in_the_same_bits",
    ),
    (
        "each rank goes on with the states of rank 0",
        py("ExactResume.load", swap("ranks[trainer.global_rank]", "ranks[0]")),
        OF_RANKS,
    ),
)

promise(
    README,
    "With Accelerate, save_state() is back in milliseconds; load_state() and end_training() wait.",
    (
        "load_state() does not wait",
        py("StateSaver.load_state", swap("saver.wait(...)")),
        "integrations/test_accelerate.py::test_another_accelerator_of_the_process_waits_for_what_it_loads",
    ),
    (
        "end_training() does not wait",
        py("StateSaver.end_training", swap("self.wait()")),
        "integrations/test_accelerate.py::test_a_failure_in_the_background_is_raised_by_end_training",
    ),
)

promise(
    DURABILITY,
    "At every rename of a Hugging Face run, get_last_checkpoint finds a whole checkpoint.",
    (
        "the Trainer removes the last checkpoint in place",
        py("transformers._finish", swap("_remove_at_once(...)", "__import__('shutil').rmtree(checkpoint)")),
        "integrations/test_transformers_best.py::"
        "test_whenever_the_process_ends_the_last_checkpoint_and_the_best_that_it_names_are_there",
    ),
)

promise(
    "docs/transformers.md",
    "A callback sees in on_save what it sees without lazyckpt, and what it writes becomes durable.",
    (
        "on_save does not wait for the folder",
        py("LazyCheckpointCallback.save", swap("self._await_folder(...)")),
        "integrations/test_transformers_on_save.py::test_only_who_may_need_the_files_waits[unknown]",
    ),
    (
        "what on_save wrote is not synced",
        py("LazyCheckpointCallback._sync_written", swap("sync_written(...)")),
        "integrations/test_transformers_on_save.py::test_what_on_save_wrote_is_synced_before_the_next_step",
    ),
)

promise(
    DURABILITY,
    "A kill leaves nothing beside the checkpoints of trainers that a script could take for one.",
    (
        "staged beside the checkpoints",
        py("in_place.stage", swap("commit.Staging(target, inside, keep_others=keep_others)", "commit.Staging(target)")),
        "test_hidden.py::test_no_idiom_ever_finds_an_unfinished_checkpoint",
    ),
    (
        "a temporary name is loaded",
        py("unfinished.refuse", swap("folders.is_unfinished(part.name)", "False")),
        "test_hidden.py::test_a_load_of_a_temporary_name_says_which_checkpoint_is_whole",
    ),
)

promise(
    "docs/torchtitan.md",
    "A run that is killed goes on from the newest whole checkpoint; old ones stay until newer ones are durable.",
    (
        "checkpoints are staged where torchtitan looks for them",
        py("LazyCheckpointManager.dcp_save", swap("hidden.place(...)", "None")),
        "integrations/test_torchtitan.py::test_a_staged_folder_is_never_taken_for_a_checkpoint",
    ),
    (
        "old checkpoints go at once",
        py(
            "LazyCheckpointManager._purge_stale_checkpoints",
            swap("self._saver.remove(...)", "removal.remove(self._folder / name)"),
        ),
        "integrations/test_torchtitan.py::"
        "test_training_goes_on_with_a_warning_if_so_wished_and_the_older_checkpoints_stay",
    ),
)

# Files from somebody else

promise(
    SECURITY,
    "lazyckpt.load and restore() run no code from a file.",
    (
        "load runs code unless it is told not to",
        py("load._weights_only", body("return bool(asked)")),
        "test_functional.py::test_weights_only_means_what_it_means_to_torch",
    ),
    (
        "restore() runs code",
        py("reading.restore", swap("Archive(..., weights_only=True)", "Archive")),
        "test_restore.py::test_a_type_that_is_not_allowed_does_not_fall_back_either",
    ),
    (
        "NumPy may be called in any way",
        py("GuardedPickle._check_call", swap("allows_call(...)", "True")),
        attacks("pickles.array_of_nobodys_memory", "pickles.bytes_of_a_number"),
    ),
)

promise(
    SECURITY,
    "A hostile file is refused before it takes memory or time, and reads nothing outside of itself.",
    (
        "a key may be nested for ever",
        py("GuardedPickle._check_depth", body("pass")),
        attacks("pickles.hash_of_a_deep_tuple"),
    ),
    (
        "a view may be larger than its storage",
        py("GuardedPickle._check_view", body("pass")),
        attacks("pickles.view_by_stride", "pickles.view_by_offset"),
    ),
    (
        "the engine reads beyond the end of a file",
        cc("Start", "r.offset > file_size_ || r.size > file_size_ - r.offset", "false"),
        "test_reader.py::test_beyond_the_end attacks/test_fuzz.py::test_the_engine_reads_inside_the_file_or_not_at_all",
    ),
    (
        "records of a zip archive may overlap, with gaps between them",
        py("torch_zip_reader._data_offsets", never_raises("corrupt")),
        "test_torch_zip.py",
    ),
    (
        "tensors of safetensors may overlap, with gaps between them",
        py("safetensors.header_of", swap("info.record.offset != end", "False")),
        "test_safetensors.py",
    ),
)

promise(
    SECURITY,
    "The index of a sharded checkpoint is read without running code, and checked before anything is allocated.",
    (
        "the index may name any class",
        py("metadata._Unpickler.find_class", body("return super().find_class(module, name)")),
        attacks("sharded.metadata_is_a_gadget"),
    ),
    (
        "an object is plain, whatever its pickle names",
        py("slices._is_plain", body("return True")),
        "test_dcp.py::test_a_hostile_pickle_runs_nothing",
    ),
    (
        "items may overlap, and lie anywhere",
        py("check_places", body("pass")),
        "test_shard_checks.py::test_items_that_share_bytes_are_refused",
    ),
)

promise(
    SECURITY,
    "Links are not followed, and names do not lead out of the folder.",
    (
        "a manifest may name files elsewhere",
        py("fields.file_name", never_raises("ValueError")),
        "test_catalog.py",
    ),
    (
        "a sweep follows links",
        py("_remove_abandoned", swap("os.O_NOFOLLOW", "0")),
        SWEEP,
    ),
    (
        "an item may lie in any file",
        py("metadata._is_in_folder", body("return True")),
        "test_folders.py::test_an_index_leads_to_no_file_outside_of_its_folder",
    ),
    (
        "files are staged in a folder that somebody else has put there",
        py("Staging.__init__", swap("os.mkdir(...)", "os.makedirs(self.path, exist_ok=True)")),
        "test_permissions.py::test_a_guessed_temporary_folder_is_not_used",
    ),
)

promise(
    SECURITY,
    "A checkpoint is never more readable during the save than afterwards, and what it replaces keeps its mode.",
    (
        "a private file that is replaced becomes readable for everybody",
        py("FileStaging.describe", swap("permissions.keep(...)")),
        "test_permissions.py::test_what_is_replaced_keeps_its_mode_and_is_never_more_readable",
    ),
    (
        "everybody may read the successor of a private folder while it is written",
        py("Staging.__init__", swap("permissions.shut(...)")),
        "test_permissions.py::test_what_is_replaced_keeps_its_mode_and_is_never_more_readable",
    ),
)

# What a checkpoint is used for

promise(
    "docs/keep-the-best.md",
    "A rollback survives a crash before the next save; the best checkpoints stay beside the last ones.",
    (
        "a rollback leaves no note",
        py("Restoring.rollback", swap("rollback.note(...)")),
        "test_history.py::test_a_rollback_outlives_a_crash_before_the_next_save",
    ),
    (
        "retention forgets the best",
        py("retention.retention", swap("c in bests", "False")),
        "test_history.py::test_keep_best_keeps_the_best_beside_the_last",
    ),
    (
        "retention removes a pinned checkpoint",
        py("retention", swap("c.pinned", "False")),
        "test_cli_prune.py::test_what_is_pinned_stays_until_it_is_unpinned",
    ),
)

promise(
    "docs/change-the-model.md",
    "restore() refuses the state of another class of optimizer before it touches anything.",
    (
        "another class of optimizer is restored",
        py("Fitting.landings", swap("refuse_other_kinds(...)")),
        "test_partial.py::test_another_optimizer_is_told_before_anything_is_touched",
    ),
)

promise(
    "docs/change-the-model.md",
    "strict=False takes the same from a file and from a sharded folder, into plain and sharded models.",
    (
        "entries that a sharded folder lacks are read from it",
        py("Shards.__init__", swap("id(it.saved) in self._names", "True")),
        "test_both_formats.py::test_a_plain_model_takes_the_same_from_a_folder",
    ),
)

promise(
    "docs/change-the-model.md",
    "strict=False refuses a checkpoint that has no weights for any tracked module.",
    (
        "weights are left out in silence",
        py("Fitting._refuse_to_take_no_weights", body("return None")),
        "test_parts.py::test_a_restore_that_would_take_no_weights_is_refused_and_lists_both_sides",
    ),
)

promise(
    "docs/epochs.md",
    "A loader that was built otherwise is an error in the middle of an epoch.",
    (
        "a loader that was built otherwise goes on",
        py("TrackedLoader._changes", body("return ''")),
        "test_loader.py::test_a_loader_that_was_built_otherwise_is_told",
    ),
)

promise(
    "docs/troubleshooting.md",
    "A version that lacks a name that lazyckpt needs is refused at import, before training begins.",
    (
        "names of torch are not looked for",
        py("formats.safe_globals", swap("check(...)")),
        "test_private_names.py::test_no_module_uses_a_name_of_torch_unchecked",
    ),
    (
        "names of a trainer are not looked for",
        py("private_names.needed", swap("check(...)")),
        "test_private_names.py::test_without_a_name_an_import_is_refused_or_training_goes_on[trainers]",
    ),
)

promise(
    "docs/providers.md",
    "What saves, restores: what could not be restored is refused by track() or by the first save().",
    ("tensors that nothing can fill are saved", py("unfillable", body("return None")), ROUND_TRIPS),
    (
        "attributes are assumed that Optimizer.__init__ makes",
        py("groups_of", body("return optimizer.param_groups")),
        "test_round_trips.py::test_what_is_saved_is_restored",
    ),
)

promise(
    README,
    "Sharded tensors are refused.",
    (
        "a shard is saved as if it were whole",
        py("sharded._part", body("return None")),
        "test_sharded.py::test_it_is_found_and_named_wherever_it_is",
    ),
)

promise(
    RANKS,
    "the file holds the bytes that they show, and no clones are needed.",
    (
        "a decision is kept for other bytes of the same storage",
        py("decision._without_memory", swap("file.offsets", "None")),
        "test_compact.py::test_flat_memory_that_moves_or_is_cut_anew_is_saved_as_it_is",
    ),
    (
        "other bytes of the same storage are taken for those of save()",
        py("one_moment._is_the_same", swap("now.offsets != file.offsets", "False")),
        "test_compact.py::test_a_handler_that_cuts_the_memory_anew_inside_save_is_noticed",
    ),
    (
        "a part of a slice begins in its storage",
        py("TensorViews.parts", swap("map(add, begins, chosen.offsets)", "chosen.offsets")),
        "test_slices.py::test_parts_of_slices_lie_in_the_slices",
    ),
    (
        "slices of a safetensors file that overlap are not found",
        py("ranges.overlaps", body("return {}")),
        "test_slices.py::test_every_tensor_that_overlaps_an_earlier_one_is_found",
    ),
    (
        "a span ends where its last tensor ends",
        cc("Split", "end = std::max(end, use.end)", "end = use.end"),
        "test_spans.py::test_any_views_load_to_what_they_are",
    ),
    (
        "opcodes of whole storages are kept for a compact file",
        py("Skeleton._opcodes_of_any", swap("(looks, outline.others, table.compact)", "(looks, outline.others)")),
        "test_spans.py::test_one_cache_serves_compact_archives_and_others",
    ),
)

promise(
    MIRRORS,
    "A place belongs to one run, and one process at a time uploads there.",
    (
        "a run uploads to the place of another",
        py("Uploads._claim", never_raises("MirrorError")),
        "test_mirrors.py::test_two_runs_do_not_mix_in_one_place",
    ),
    (
        "an older process goes on to upload beside a newer one",
        py("Bucket._check_writer", body("return None")),
        "test_mirrors.py::test_of_two_processes_of_one_run_the_older_one_stops",
    ),
)

promise(
    MIRRORS,
    "Rank 0 looks until the files of all ranks lie there with their checksums, and then writes the manifest.",
    (
        "rank 0 does not wait for the files of other ranks",
        py("Others.late", body("return iter(())")),
        "tiers/test_others.py::test_a_commit_waits_for_a_file_with_the_right_label",
    ),
    (
        "rank 0 compares no label of the files of other ranks",
        py("Bucket._lacking", swap("self._sent(...)", "self._objects(checkpoint)")),
        "tiers/test_others.py::test_a_commit_waits_for_a_file_with_the_right_label",
    ),
    (
        "a rank uploads files of another save of the step",
        py("Helper._bring", swap("digest_of(text) == word.digest", "True")),
        "tiers/test_others.py::test_a_step_that_was_saved_again_is_not_mixed",
    ),
    (
        "a rank that has slept ends its upload",
        py("Helper._parts", never_raises("_Over")),
        "tiers/test_others.py::test_a_rank_that_slept_does_not_end_an_upload_that_is_over",
    ),
    (
        "a file that came too late stays below the manifest",
        py("Bucket.mend", body("return None")),
        "tiers/test_others.py::test_a_file_that_came_too_late_is_put_right",
    ),
    (
        "a rank can add to a folder that has its name",
        py("write_copy", swap("removal.remove(...)", "None")),
        "tiers/test_others.py::test_a_rank_that_slept_does_not_end_an_upload_that_is_over",
    ),
)

promise(
    MIRRORS,
    "No rank waits for a dead one.",
    (
        "rank 0 waits for the files of a rank that is lost",
        py("Others._is_late", swap("self._lost.add(rank)", "None")),
        "tiers/test_others.py::test_the_files_of_a_lost_rank_are_sent_by_rank_0",
    ),
    (
        "a rank waits for a rank 0 that is lost",
        py("Helper._look", swap("self._check_rank_0(left[-1])", "None")),
        "tiers/test_others.py::test_a_rank_without_rank_0_asks_the_place",
    ),
)

promise(
    MIRRORS,
    "A file that has rotted on the disk is not sent.",
    (
        "an upload compares no checksum",
        py("parts_of", never_raises("CorruptFileError")),
        "test_mirrors.py::test_a_file_that_has_rotted_here_does_not_go_there",
    ),
)

promise(
    MIRRORS,
    "In the folder of the run, a checkpoint stays until the uploads that need it are done.",
    (
        "retention removes a checkpoint during its upload",
        py("Lineage.superfluous", swap("self._mirrors.holds()", "set()")),
        "test_mirrors.py::test_saves_do_not_wait_for_a_mirror_and_only_the_newest_waits",
    ),
)

promise(
    MIRRORS,
    "If the only place that may hold a checkpoint cannot be read, restore() raises ReadError.",
    (
        "a mirror that cannot be read counts as empty",
        py("TieredCatalog.scan", swap("self.unread.append(...)", "None")),
        "test_mirrors.py::test_an_unreachable_mirror_is_no_empty_one",
    ),
)

promise(
    MIRRORS,
    "An object that another upload has put below a manifest is damage.",
    (
        "objects are not compared with their manifest",
        py("check_labels", never_raises("CorruptFileError")),
        "test_mirrors.py::test_an_object_of_another_upload_is_damage",
    ),
)

promise(
    MIRRORS,
    "If a place holds a newer checkpoint that this run did not restore, nothing is removed there.",
    (
        "the retention of a mirror weighs the checkpoints of another process",
        py("Uploads._prune", swap("known[0].sequence > last.sequence", "False")),
        "test_mirrors.py::test_what_another_process_has_uploaded_is_not_pruned",
    ),
)

promise(
    MIRRORS,
    "Headers of files are asked for 16 at a time, too",
    (
        "headers are asked for one by one",
        py("_Blocks.will_need", body("return")),
        "formats/test_objects.py::test_the_headers_of_large_records_come_together_and_without_what_lies_between",
    ),
    (
        "the ends of items are asked for one by one",
        py("read_slices", swap("file.will_need(_ends(file, [wanted.place for wanted in slices]))", "None")),
        "reading/test_sharded_objects.py::test_the_ends_of_items_come_together",
    ),
    (
        "a file of a folder is opened for each of its objects",
        py("ShardedFolder._object", swap("self._objects.get(name)", "None")),
        "reading/test_sharded_objects.py::test_a_file_is_opened_once_for_all_its_objects",
    ),
)

promise(
    MIRRORS,
    "Ctrl-C acts at once, also while a store says nothing: what it sends later lands nowhere.",
    (
        "the main thread waits inside the library",
        py("interruptible", body("return call()")),
        "test_stalls.py::test_ctrl_c_acts_while_a_store_stalls",
    ),
    (
        "bytes that come after Ctrl-C land",
        cc("RangeReader::LandFetched", "if (failed_) return false;"),
        "test_reader.py::test_ctrl_c_ends_a_read_whose_requests_stall_and_nothing_is_written_later",
    ),
    (
        "ranks that read together wait for requests under way",
        cc("RangeReaderHandle::Cancel", "if (reader != nullptr) reader->Cancel();"),
        "tiers/test_ranks.py::test_ctrl_c_ends_a_restore_of_ranks_while_a_store_stalls[state.pt]",
    ),
    (
        "a signal that comes just before a wait does not end it",
        py("awaited", swap("wait([future], waits.HANDLE_LOOK_S).not_done", "wait([future]).not_done")),
        "tiers/test_ranks.py::test_ctrl_c_ends_a_restore_of_ranks_while_a_store_stalls[state.pt]",
    ),
    (
        "a rank that is interrupted leaves the others waiting",
        py("GroupTeam._outcome", swap("self.lookout().leave(interrupt)", "None")),
        "tiers/test_ranks.py::test_ctrl_c_ends_a_restore_of_ranks_while_a_store_stalls[rank-1.pt]",
    ),
)

promise(
    MIRRORS,
    "If another place has a checkpoint, a mirror that says nothing for 10 s is passed over with a warning.",
    (
        "an empty place stands for a silent one",
        py("listings", swap("suffice(_)", "True")),
        "test_listings.py::test_an_empty_place_does_not_stand_for_a_silent_one",
    ),
)

promise(
    MIRRORS,
    "`rollback(step)` raises ReadError if a mirror cannot be read, before it touches anything.",
    (
        "a rollback takes an unread mirror for empty",
        py("Restoring._restore", swap("team.follow(check)")),
        "tiers/test_mirrors.py::test_a_rollback_is_refused_while_a_mirror_cannot_be_read",
    ),
)

promise(
    MIRRORS,
    "On a server of fsspec, a folder that cannot be listed is no empty one.",
    (
        "fsspec's empty list for a refusal is believed",
        py("_check_empty", body("return None")),
        "tiers/test_filesystems.py::test_rights_that_are_missing_are_told",
    ),
)

promise(
    MIRRORS,
    "A reader of the Hub sees the old model or the new one, and no mix.",
    (
        "shards of an older model stay beside the new ones",
        py("Hub.upload", swap("name not in names", "False")),
        "tiers/test_hub.py::test_shards_of_an_older_model_go_in_the_same_commit",
    ),
    (
        "a commit does not name the one before it",
        py("Hub.upload", swap("there.sha", "None")),
        "tiers/test_hub.py::test_a_commit_in_between_is_kept",
    ),
)

promise(
    MIRRORS,
    "Where the file system of a mirror is not mounted, the mirror does not count as empty.",
    (
        "an upload makes the folders below a mount point",
        py("MountedFolder._check_mounted", body("pass")),
        "test_in_use.py::test_a_mount_point_without_its_file_system_is_no_empty_mirror",
    ),
)

promise(
    MIRRORS,
    "A pickle of a Mirror holds no credentials.",
    (
        "a Mirror is pickled with its options",
        py("Mirror.__reduce__", never_raises("TypeError")),
        "test_mirror.py::test_a_pickle_does_not_hold_secrets_unless_a_process_is_started_with_it",
    ),
)

promise(
    MIRRORS,
    "From an object store the bytes go straight into the tracked tensors.",
    (
        "an object is in memory before it lands",
        py(
            "ParallelRead.__init__",
            swap(
                "partial(path.store.stream, path.key)",
                "lambda begin, end, whole=memoryview(bytes(path.store.read(path.key, 0, "
                "path.store.entry(path.key).nbytes))): [whole[begin:end]]",
            ),
        ),
        "test_memory.py::test_no_second_copy_of_the_state_is_in_memory",
    ),
)

promise(
    MIRRORS,
    "What a trainer removes stays here while it is being uploaded.",
    (
        "a path is removed while its upload reads it",
        py("SavedMirrors.let_go", body("remove()")),
        "test_saved.py::test_what_is_being_uploaded_stays_here_and_what_waits_behind_a_newer_one_goes",
    ),
)

promise(
    MIRRORS,
    "The copy has a manifest, so a half one is never seen and every byte is verified.",
    (
        "files that other code has changed are described as the engine wrote them",
        py("Saved._entry", swap("known[0] != stamp", "False")),
        "test_saved.py::test_files_of_other_code_are_read_as_they_are_when_they_go",
    ),
    (
        "a copy of a trainer's file is pulled unverified",
        py("_downloaded", never_raises("CorruptFileError")),
        "test_saved.py::test_a_damaged_copy_is_not_pulled",
    ),
    (
        "folders that were not begun by an upload are removed after a day",
        py("Bucket._note_half", swap("begun is None and not manifest.is_folder_name(name)", "False")),
        "test_saved.py::test_abandoned_halves_go_and_nothing_else",
    ),
)

promise(
    MIRRORS,
    "The best checkpoint, as Lightning or the Trainer knows it, stays in any case.",
    (
        "retention of a mirror removes the best checkpoint",
        py("Uploads._prune", swap("checkpoint.path.name not in self.kept", "True")),
        "test_transformers_mirrors.py::test_the_best_checkpoint_stays_there",
    ),
)

promise(
    MIRRORS,
    "The Trainer of Hugging Face sends a folder when `on_save` of the other callbacks has returned.",
    (
        "a folder goes before on_save has returned",
        py("LazyCheckpointCallback.save", swap("staged.save(...)", "staged.save(blocking=blocking)")),
        "test_transformers_mirrors.py::test_what_callbacks_add_goes_there_too",
    ),
)
