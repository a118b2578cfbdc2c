"""The safeties, and what stands in the place of each when it is taken out, in the order of docs/architecture.md.

A line: what goes wrong, the text that stands once in the file, what stands there instead, the tests meant to notice.
"""

from __future__ import annotations

from mutants import Mutant

MUTANTS: list[Mutant] = []


def _attacks(*names: str) -> str:
    return " ".join(f"attacks/test_attacks.py::test_no_one_gets_in[{name}]" for name in names)


def _in(file: str, *lines: tuple[str, str, str, str]) -> None:
    MUTANTS.extend(Mutant(what, file, old, new, tests) for what, old, new, tests in lines)


ORDER = "test_commit.py::test_the_order_of_syncs_and_renames test_faults.py::test_every_call_of_the_commit_fails"
WAITS = "test_gate.py::test_a_step_waits_for_what_it_changes"
THREADS = "test_gate_threads.py"
HOOKS = "integrations/test_accelerate.py"
REDIRECT = "integrations/test_redirect.py"
EVERY_OPERATION = "test_faults.py::test_every_operation_of_a_save_fails"
PASSING = "test_faults.py::test_passing_troubles_are_overcome"
READS = (
    "test_reader.py::test_every_failing_read_is_told "
    "test_reader.py::test_a_file_that_shrinks_while_it_is_read "
    "test_reader.py::test_beyond_the_end"
)
VERIFY = (
    "test_cli.py::test_verify_names_the_damaged_record_and_its_tensor "
    "test_cli.py::test_verify_of_damage_outside_the_records "
    "test_cli.py::test_verify_of_damaged_safetensors"
)
DEVICES = "test_cuda.py test_cuda_training.py"
UPLOADS = "test_cuda.py::test_a_read_waits_once_for_all_that_it_copies_to_a_device"
TORN = "test_snapshot.py::test_a_write_between_save_and_step_fails_the_checkpoint_and_names_the_tensor"
WRAPPERS = "test_wrappers.py::"
FROZEN = "test_snapshot.py::test_a_silent_change_of_a_lazy_frozen_parameter_fails_and_makes_it_eager_for_good"
ARCHIVES = (
    "test_torch_zip.py::test_attacks_are_refused "
    "test_torch_zip.py::test_unsafe_names_are_refused "
    "test_torch_zip.py::test_names_twice_are_refused "
    "test_torch_zip.py::test_zip64_end_that_contradicts_is_refused "
    "test_torch_zip.py::test_end_that_contradicts_the_zip64_end_is_refused "
    "test_torch_zip.py::test_extra_fields_are_checked "
    "test_torch_zip.py::test_archives_of_other_kinds_are_not_supported "
    "test_torch_zip.py::test_every_truncation_and_extension_is_refused "
    "test_torch_zip.py::test_every_bit_flip_is_refused_or_found_or_harmless"
)
SAFETENSORS = (
    "test_safetensors.py::test_headers_that_lie_are_refused "
    "test_safetensors.py::test_text_that_is_no_header_is_refused "
    "test_safetensors.py::test_a_header_longer_than_allowed_is_refused_unread "
    "test_safetensors.py::test_dtypes_that_torch_lacks_are_not_supported "
    "test_safetensors.py::test_every_truncation_is_refused "
    "test_safetensors.py::test_every_bit_flip_is_refused_or_found"
)

# commit.py: the steps of durability

_in(
    "lazyckpt/storage/commit.py",
    (
        "a staging folder that another run removed is not made again",
        "if inside is None or inside.exists():",
        "if True:",
        "integrations/test_transformers.py::test_another_run_that_ends_takes_the_empty_staging_folder_away",
    ),
    (
        "a folder that cannot be listed is replaced",
        "os.walk(old, onerror=_raise)",
        "os.walk(old)",
        "test_permissions.py::test_a_folder_that_cannot_be_listed_is_not_replaced",
    ),
    ("what is to be synced is opened and closed", "os.fsync(fd)", "pass", ORDER),
    (
        "a link is not synced",
        "    publish_file(unfinished, name)\n",
        "    os.replace(unfinished, name)\n",
        "test_commit.py::test_a_link_is_synced_after_it_has_its_name",
    ),
    (
        "the folder of a new run is not synced",
        "sync_path(folder.absolute().parent)",
        "pass",
        "test_commit.py::test_the_name_of_the_run_itself_is_synced",
    ),
    (
        "nor those above it",
        "[path, *(folder for folder in path.parents if not folder.exists())]",
        "[path]",
        "test_commit.py::test_the_name_of_the_run_itself_is_synced",
    ),
    (
        "a folder that somebody has put there is staged in",
        "            os.mkdir(self.path)\n",
        "            os.makedirs(self.path, exist_ok=True)\n",
        "test_permissions.py::test_a_guessed_temporary_folder_is_not_used",
    ),
    (
        "the manifest is synced before it is written",
        "            file.flush()\n",
        "",
        "test_commit.py::test_the_manifest_is_whole_when_it_is_synced",
    ),
    ("the manifest is not synced", "os.fsync(file.fileno())", "pass", ORDER),
    (
        "the staged folder is not synced",
        ("                    sync_path(file)\n            sync_path(folder)\n"),
        "                    sync_path(file)\n",
        ORDER,
    ),
    (
        "what others staged is not synced",
        "sync_path(file)",
        "pass",
        "test_saver.py::test_what_others_wrote_into_the_folder_is_synced_before_it_is_published",
    ),
    ("the folder of a published checkpoint is not synced", "sync_path(self.target.parent)", "pass", ORDER),
    (
        "nor the folder that it was staged in",
        "sync_path(self.path.parent)",
        "pass",
        "test_commit.py::test_the_folder_that_a_checkpoint_was_staged_in_is_synced_too",
    ),
    (
        "the folder of a published file is not synced",
        ("    os.replace(temporary, target)\n    sync_path(target.parent)"),
        "    os.replace(temporary, target)",
        (
            "test_faults.py::test_a_lone_file_fails test_commit.py "
            "test_functional.py::test_a_file_is_replaced_atomically_and_nothing_else_is_left"
        ),
    ),
    (
        "a checkpoint is copied to its name, not renamed",
        ("            os.rename(self.path, self.target)\n        self._published"),
        ("            shutil.copytree(self.path, self.target)\n        self._published"),
        ORDER,
    ),
    (
        "a file is copied to its name, not renamed",
        "    os.replace(temporary, target)",
        "    shutil.copyfile(temporary, target)",
        (
            "test_functional.py::test_a_file_is_replaced_atomically_and_nothing_else_is_left "
            "test_saver.py::test_a_file_is_replaced_only_by_a_whole_one "
            "test_faults.py::test_a_lone_file_fails"
        ),
    ),
    (
        "a failed sync of the folder is ignored",
        "raise OSError(error.errno, what, str(self.target.parent)) from error",
        "del what",
        "test_commit.py::test_a_failed_sync_of_the_parent_is_an_error",
    ),
    (
        "a step is not replaced in one go",
        "            _engine.rename_exchange(self.path, self.target)",
        '            raise OSError(errno.EINVAL, "")',
        (
            "test_checkpointer.py::test_saving_a_step_again_replaces_it_atomically "
            "test_commit.py::test_the_order_of_syncs_and_renames "
            "test_faults.py::test_every_call_of_the_commit_fails"
        ),
    ),
    (
        "what could not be replaced does not get its name back",
        ("            os.rename(old, self.target)\n            raise"),
        "            raise",
        ORDER,
    ),
    (
        "a failed publication removes what it replaced",
        ("            if not self._published:\n                shutil"),
        ("            if True:\n                shutil"),
        "test_faults.py::test_a_replaced_checkpoint_outlives_a_failed_publication",
    ),
    (
        "a failed checkpoint stays where it was staged",
        "                shutil.rmtree(self.path, ignore_errors=True)\n        finally",
        "                pass\n        finally",
        "test_commit.py::test_discard_leaves_nothing",
    ),
    (
        "what others put into a replaced folder is lost",
        "            _carry_over(replaced, self.target)  # what was put there in between",
        "            pass",
        "test_commit.py::test_what_others_put_into_a_replaced_folder_stays",
    ),
    (
        "what others put there first is missing for an instant",
        "                _carry_over(self.target, self.path)\n",
        "                pass\n",
        "test_commit.py::test_what_is_carried_over_is_synced",
    ),
    (
        "what is carried over is not synced",
        "sync_path(into / name)",
        "pass",
        "test_commit.py::test_what_is_carried_over_is_synced",
    ),
    (
        "nor the folder that it is carried into",
        ("    for into in reversed(changed):  # a folder's name is in the one above it\n        sync_path(into)"),
        "    del changed",
        "test_commit.py::test_what_is_carried_over_is_synced",
    ),
    (
        "a sweep takes what others have given a similar name",
        "return _UNFINISHED.fullmatch(name) is not None",
        "return name.startswith((TEMPORARY, TRASH))",
        "test_commit.py::test_sweep_spares_the_living_and_takes_the_dead",
    ),
    (
        "a sweep heeds no lock",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "test_commit.py::test_sweep_spares_the_living_and_takes_the_dead",
    ),
    (
        "a sweep lets go of the lock before it removes",
        ("        shutil.rmtree(path, ignore_errors=True)\n        return True"),
        (
            "        fcntl.flock(fd, fcntl.LOCK_UN)\n"
            "        shutil.rmtree(path, ignore_errors=True)\n"
            "        return True"
        ),
        "test_commit.py::test_sweep_holds_the_lock_until_the_folder_is_gone",
    ),
    (
        "what is swept may get its name back",
        "        sync_path(path.parent)\n        shutil",
        "        shutil",
        "test_commit.py::test_what_was_replaced_is_swept_when_its_name_is_gone_for_good",
    ),
    (
        "a sweep follows links",
        "os.O_CLOEXEC | os.O_NOFOLLOW)",
        "os.O_CLOEXEC)",
        "test_commit.py::test_a_sweep_follows_no_link",
    ),
    (
        "a staged folder is not locked",
        "fcntl.flock(self._lock, fcntl.LOCK_EX)",
        "pass",
        "test_commit.py::test_sweep_spares_the_living_and_takes_the_dead",
    ),
    (
        "a staged folder may go without a lock",
        "if error.errno not in NO_LOCKS:",
        "if False:",
        "test_commit.py::test_a_lock_that_fails_is_an_error",
    ),
    (
        "nobody looks whether it was swept before it was locked",
        ("                if os.path.isdir(self.path):\n                    return\n"),
        "                return\n",
        "test_commit.py::test_a_folder_swept_before_it_was_locked_is_made_anew",
    ),
    (
        "a forked child keeps the locks",
        "os.register_at_fork(after_in_child=_close_locks_in_child)\n",
        "",
        "test_commit.py::test_a_forked_child_does_not_keep_the_lock_of_its_parent",
    ),
    (
        "a manifest is written over what is there",
        'with open(path, "x", encoding="utf-8", opener=',
        'with open(path, "w", encoding="utf-8", opener=',
        "test_commit.py::test_a_manifest_is_written_to_a_new_file",
    ),
    (
        "what is removed may get its name back",
        "sync_path(trash.parent)",
        "pass",
        "test_commit.py::test_the_final_name_is_gone_for_good_before_what_had_it",
    ),
    (
        "what is removed is not hidden first",
        "os.rename(path, trash)",
        ("os.stat(path)\n        return path"),
        "test_commit.py::test_what_is_removed_is_out_of_sight_at_once",
    ),
)

# in_place.py, mounts.py: folders that cannot be renamed

CRASHES = "test_in_place.py::test_a_crash_leaves_one_checkpoint_or_none_that_loads"
IMAGES = "crash/test_crash_images.py::test_every_crash_image"
FILLED = "test_in_place.py::test_a_folder_that_cannot_be_renamed_is_filled"

_in(
    "lazyckpt/storage/in_place.py",
    (
        "the old marker stays while the files of the new one come",
        "        (target / file).unlink(missing_ok=True)\n",
        "        pass\n",
        CRASHES,
    ),
    (
        "the marker does not come last",
        "if str(file) == noted]",
        "if not noted]",
        CRASHES,
    ),
    (
        "that the marker is gone is not synced",
        "        (target / file).unlink(missing_ok=True)\n    sync()\n",
        "        (target / file).unlink(missing_ok=True)\n",
        IMAGES,
    ),
    (
        "nor the files that come before the marker",
        "    sync()\n    for file in marker:\n        _link",
        "    for file in marker:\n        _link",
        IMAGES,
    ),
    (
        "what was filled in is not synced",
        "    sync()\n    shutil.rmtree(ready)\n",
        "    shutil.rmtree(ready)\n",
        IMAGES,
    ),
    (
        "files of an older checkpoint come back",
        "    shutil.rmtree(ready)\n    commit.sync_path(target)",
        "    shutil.rmtree(ready)\n    pass",
        IMAGES,
    ),
    (
        "a renamed file has neither name after a power cut",
        "        os.link(file, name, follow_symlinks=False)\n",
        "        os.rename(file, name)\n",
        IMAGES,
    ),
    (
        "that a checkpoint is to be published is not synced",
        "            commit.sync_path(self.target)\n",
        "",
        IMAGES,
    ),
    (
        "what is older is finished over what is newer",
        "        finish(self.target)  # or an older checkpoint would come after this one\n",
        "",
        "test_in_place.py::test_after_an_error_the_next_save_is_the_one_that_stays",
    ),
    (
        "to finish does not wait for a process that is at it",
        "        fcntl.flock(fd, fcntl.LOCK_EX)\n",
        "",
        "test_in_place.py::test_to_finish_waits_for_who_is_at_it",
    ),
    (
        "what is not ours is found out half way",
        "        _contents(self.path, self.target)  # raises before anything is touched\n",
        "",
        "test_in_place.py::test_what_is_not_ours_does_not_go_for_a_checkpoint",
    ),
)
_in(
    "lazyckpt/storage/mounts.py",
    ("the working folder is taken away", "held.add(Path.cwd())", "pass", FILLED),
    ("the way to a mount point is renamed", "folder == path or folder in path.parents", "folder == path", FILLED),
    ("bind mounts of one disk are taken for one", 'Path("/proc/self/mountinfo")', 'Path("/none")', FILLED),
)
_in(
    "lazyckpt/saver.py",
    (
        "a link to a folder is replaced",
        '            if target.is_symlink() or target.name == "..":',
        '            if target.name == "..":',
        "test_in_place.py::test_a_link_to_the_folder_stays",
    ),
)

# Folders of a lower layer of an overlay

OVERLAY = "test_overlay.py"
_in(
    "lazyckpt/saver.py",
    (
        "a folder of an image is renamed",
        "not target.is_dir() or staging.may_replace()",
        "True",
        f"{OVERLAY}::test_a_folder_of_the_image_is_filled",
    ),
)
_in(
    "lazyckpt/storage/mounts.py",
    (
        "a file of an image is copied to be removed",
        "return file_system(folder)[0] in OVERLAYS",
        "return False",
        f"{OVERLAY}::test_a_folder_and_a_file_of_the_image_are_removed",
    ),
)
_in(
    "lazyckpt/storage/commit.py",
    (
        "a step of an image is not replaced",
        "if error.errno == errno.EXDEV and not self._keep_others:",
        "if False:",
        f"{OVERLAY}::test_a_step_of_the_image_is_replaced",
    ),
    (
        "a folder is taken apart in any order",
        'for endings in ((MANIFEST,), WEIGHTS, ("",)):',
        'for endings in (("",),):',
        f"{OVERLAY}::test_a_crash_in_a_removal_leaves_nothing_that_loads "
        f"{OVERLAY}::test_a_manifest_is_gone_for_good_before_anything_else_goes",
    ),
    (
        "what is taken apart is not synced in between",
        "        os.fsync(folder)\n",
        "",
        f"{OVERLAY}::test_a_manifest_is_gone_for_good_before_anything_else_goes",
    ),
    (
        "a new checkpoint is taken apart in place of the old one",
        " or not os.path.samestat(os.fstat(fd), path.lstat())",
        "",
        f"{OVERLAY}::test_what_took_the_place_of_a_folder_meanwhile_stays",
    ),
)

# FUSE

FUSE = "test_fuse.py::test_what_is_saved_arrives test_fuse.py::test_what_the_user_sets_is_what_is_done"
_in(
    "csrc/engine.cc",
    (
        "FUSE is taken for a disk",
        'const bool fuse = IsOnFuse((std::filesystem::path(path).parent_path() / ".").string());',
        "const bool fuse = false;",
        FUSE,
    ),
    ("io_uring writes to FUSE", 'fuse && options_.backend == "auto"', "false", FUSE),
    ("direct writes go to FUSE", "options_.direct.value_or(!fuse)", "options_.direct.value_or(true)", FUSE),
)
_in(
    "csrc/io_posix.cc",
    (
        "nobody is woken by what the pool has written",
        "      if (waker_ != nullptr) waker_->Wake();\n",
        "",
        "test_fuse.py::test_a_lone_file_arrives",
    ),
)

# readback.py: what the disk gives back

_in(
    "lazyckpt/pipeline/background.py",
    (
        "nothing is read back",
        "if self._config.verify_after_write:",
        "if False:",
        "test_readback.py::test_a_write_that_was_lost_fails_the_save "
        "test_readback.py::test_a_checkpoint_that_was_lost_is_not_committed",
    ),
)
_in(
    "csrc/py_job.cc",
    (
        "what is read back is not compared",
        "if (r.crc != copied[i])",
        "if (false)",
        "test_readback.py::test_a_write_that_was_lost_fails_the_save",
    ),
    (
        "the page cache is read back",
        "options.past_cache = true;",
        "",
        "test_readback.py::test_the_page_cache_is_not_asked",
    ),
)

# tasks.py: nothing is lost for lack of memory

_in(
    "lazyckpt/pipeline/tasks.py",
    (
        "a thread that never begins is waited for",
        "                thread._started = _Born()  # type: ignore[attr-defined]\n",
        "",
        "memory/test_memory.py::test_a_thread_that_lacks_memory_to_begin_is_refused",
    ),
    (
        "a task that lacks memory to begin is dropped",
        "        except MemoryError:\n            time.sleep(_NO_MEMORY_S)\n",
        "        except MemoryError:\n            task = None\n",
        "memory/test_memory.py::test_what_lacks_memory_to_begin_begins_again",
    ),
    (
        "a handle keeps its lock for lack of memory",
        '    __exit__ = property(attrgetter("_lock.__exit__"))\n',
        "",
        "memory/test_memory.py::test_every_allocation_of_a_part[handle]",
    ),
    (
        "a checkpoint that is done is kept until the next",
        "            task.run = _nothing",
        "            pass",
        "test_leaks.py::test_a_checkpoint_that_is_done_keeps_nothing_until_the_next",
    ),
    (
        "a mistake is taken for a lack of memory for ever",
        "doubts < _DOUBTS",
        "True",
        "memory/test_memory.py::test_what_only_looks_like_a_lack_of_memory_is_told",
    ),
)

# handle.py: what is held by who saved

_in(
    "lazyckpt/pipeline/handle.py",
    (
        "wait_captured of a handle does not wait",
        "released = snapshot.job.wait_released(timeout)",
        "released = True",
        "test_gate.py::test_after_wait_captured_of_a_handle_everything_may_change",
    ),
    (
        "nor does it verify",
        "            snapshot.verify_soon()  # now, since the caller is free to change everything\n",
        "            pass\n",
        "test_gate.py::test_after_wait_captured_of_a_handle_everything_may_change",
    ),
    (
        "a forked child waits for saves of its parent",
        "os.register_at_fork(after_in_child=_disown)\n",
        "",
        "test_endings.py::test_a_child_that_waits_for_a_save_of_its_parent_hears_of_it",
    ),
)

# background.py: when they are taken

_in(
    "lazyckpt/pipeline/background.py",
    (
        "a checkpoint does not wait for the ones before it",
        "tasks.wait_for([flight.previous])",
        "pass",
        "test_checkpointer.py::test_several_in_flight_commit_in_order",
    ),
    (
        "a removal overtakes a link that is being made",
        "        tasks.wait_for(earlier)\n",
        "",
        "test_saver.py::test_removed_only_behind_the_done_callbacks "
        "integrations/test_lightning.py::test_no_checkpoint_goes_before_last_can_do_without_it",
    ),
    (
        "a save that failed at once counts for no removal",
        "        self._last = handle\n        self.finish",
        "        self.finish",
        "test_saver.py::test_kept_when_what_came_after_failed_at_once",
    ),
    ("the engine's errors are not asked for", "job.raise_error()", "pass", EVERY_OPERATION),
    (
        "published before the files are durable",
        "            job.wait_settled()\n            _raise_torn",
        "            _raise_torn",
        ("test_faults.py::test_several_in_flight_fail_alone test_faults.py::test_every_operation_of_a_save_fails"),
    ),
    (
        "acknowledged before it is published",
        "staging.describe(target.manifest(files), target.files)",
        ("handle.set_result(handle.path)\n            staging.describe(target.manifest(files), target.files)"),
        ORDER,
    ),
    (
        "the gate is opened before all is copied",
        "            job.wait_released()\n",
        "",
        "test_consistency.py",
    ),
    (
        "a failed checkpoint lets go of what is being copied",
        ("                    job.wait_settled()\n                    _let_go(snapshot)\n"),
        "                    _let_go(snapshot)\n",
        "test_cuda_training.py::test_a_save_that_fails_holds_what_is_being_copied",
    ),
    (
        "an error that nobody thought of is lost",
        "except BaseException as caught:  # nothing may be lost on this thread",
        "except ZeroDivisionError as caught:",
        "test_checkpointer.py::test_an_error_that_nobody_thought_of_is_told",
    ),
    (
        "what fails for lack of memory is told to nobody, if there is none for the error",
        "            except Exception as lack:  # somebody waits for the handle\n",
        "            except ZeroDivisionError:\n",
        "test_faults.py::test_a_failure_that_lacks_memory_for_its_error_is_told",
    ),
    (
        "the gate opens before the disk has it",
        "if snapshot.durable is None:  # otherwise steps still wait for the disk",
        "if True:",
        "test_checkpointer.py::test_before_step_makes_the_step_wait_for_the_disk",
    ),
    (
        "a torn snapshot is published",
        "    if snapshot.torn is not None:\n        raise",
        "    if False:\n        raise",
        TORN,
    ),
    (
        "who never steps is not verified",
        "            if not snapshot.await_verdict():\n",
        "            if False:\n",
        "test_snapshot.py test_saver.py::test_a_parameter_written_to_behind_the_gate_is_named",
    ),
    ("frozen parameters are not verified", "snapshot.verify_frozen()", "pass", FROZEN),
    (
        "what is removed may be what was just saved under that name",
        "            with self._naming:\n                replaced",
        "            if True:\n                replaced",
        "test_checkpointer.py::test_a_step_that_is_saved_again_while_it_is_removed_stays",
    ),
    (
        "a failed checkpoint lets old ones go",
        ("            if error is None:\n                self._remove_all("),
        ("            if True:\n                self._remove_all("),
        "test_checkpointer.py::test_nothing_is_removed_when_a_save_fails",
    ),
    (
        "removed although what came after it failed",
        "if failed:",
        "if False:",
        "test_saver.py::test_kept_when_what_came_after_failed",
    ),
    (
        "removed although it was saved again",
        "self._doomed.discard(flight.handle.path)",
        "pass",
        "test_saver.py::test_what_is_saved_again_is_not_removed",
    ),
    (
        "removed while it is saved again",
        ("            with self._removal:\n                trash ="),
        ("            if True:\n                trash ="),
        "test_saver.py::test_nothing_is_saved_between_the_question_and_the_removal",
    ),
    (
        "nothing waits for room",
        "while len(self._in_flight) >= self._config.max_in_flight:",
        "while False:",
        "test_checkpointer.py::test_max_in_flight_waits_and_says_how_long",
    ),
    (
        "closed before all is durable",
        "wait_for(self._tasks, saves=self._in_flight)",
        "pass",
        "test_checkpointer.py test_saver.py",
    ),
    (
        "a failure is told to nobody",
        "self._failed.append(handle)",
        "pass",
        "test_faults.py::test_training_hears_of_a_failure",
    ),
)

# snapshot.py, ownership.py, gate.py, saver.py: one instant

_in(
    "lazyckpt/capture/snapshot.py",
    ("a step does not wait", "job.wait_captured(owners)", "pass", WAITS),
    (
        "a storage gives back what is being copied",
        "            job.wait_captured(self.owners[at])\n",
        "",
        "test_snapshot.py::test_a_storage_lets_go_of_its_memory_when_that_is_copied",
    ),
    (
        "a step does not wait for the disk",
        "                wait_durable(self.durable)",
        "                pass",
        "test_checkpointer.py::test_before_step_makes_the_step_wait_for_the_disk",
    ),
    (
        "audit looks while the device may still copy",
        "((on_device and not self._crcs) or devices.capturing())",
        "(on_device or devices.capturing())",
        "test_cuda_training.py::test_who_writes_behind_the_optimizers_back_is_named",
    ),
    (
        "an owner steps while somebody looks at what it changes",
        "        with self._lock:\n            todo",
        "        if True:\n            todo",
        "test_snapshot.py::test_a_step_waits_for_whoever_looks_at_what_it_changes",
    ),
    (
        "what is copied later may be freed",
        "self.streams, self._held, self._cuda =",
        "self.streams, _, self._cuda =",
        "test_cuda_training.py::test_what_is_elsewhere_is_copied_by_torch",
    ),
    (
        "versions are not compared",
        "if (version != before or tensor",
        "if (tensor",
        "test_torn.py::test_the_next_save_copies_all_and_later_ones_what_was_torn",
    ),
    (
        "pointers are not compared",
        "if p != self.pointers[source] or storage.nbytes() != self.sizes[source]",
        "if False",
        "test_snapshot.py::test_a_parameter_whose_storage_is_resized_fails_the_checkpoint",
    ),
    (
        "sizes are not compared",
        " or storage.nbytes() != self.sizes[source]",
        "",
        "test_snapshot.py::test_a_parameter_whose_storage_is_resized_fails_the_checkpoint",
    ),
    (
        "audit does not look at copies",
        "if copied[s] != self._crcs[s]",
        "if False",
        (
            "test_snapshot.py::test_audit_finds_a_write_that_was_undone_before_the_step "
            "test_consistency.py::test_audit_names_what_is_written_behind_the_gate"
        ),
    ),
    (
        "audit does not look at the gate",
        "if now[s] != self._crcs[s]",
        "if False",
        "test_snapshot.py::test_audit_finds_a_write_after_the_copy_and_before_the_step",
    ),
    (
        "who was given parameters waits for his old ones",
        "if parameters is not None and parameters == parameters_of(owner):",
        "if parameters is not None:",
        "test_gate.py::test_an_optimizer_that_was_given_parameters_since_the_save_waits",
    ),
    (
        "who is new waits for nothing",
        "self._owners.get(owner, (0, None))",
        "self._owners.get(owner, (0, parameters_of(owner)))",
        "test_gate.py::test_an_optimizer_that_was_never_seen_before_waits",
    ),
    (
        "what one owner verified is never looked at again",
        "todo = owners & ~self._verified",
        "todo = 0 if self._verified else owners",
        "test_snapshot.py::test_a_write_after_the_step_of_another_owner_is_found",
    ),
    ("frozen parameters may change", "return same or not was_lazy", "return True", FROZEN),
    (
        "frozen parameters are trusted at once",
        "return view.key in self._twice and seen",
        "return seen",
        "test_snapshot.py",
    ),
    ("frozen parameters may move their version", " and seen[:3] == here", "", "test_snapshot.py"),
    (
        "what torch has to copy is lazy",
        "owners = [0 if device == devices.ELSEWHERE else bits for",
        "owners = [bits for",
        "test_cuda_training.py::test_what_is_elsewhere_is_copied_by_torch",
    ),
    (
        "a wrapper that was given another tensor still tells of the one before",
        "(version != before or not link.holds())",
        "version != before",
        WRAPPERS + "test_a_write_outside_of_a_step_fails_the_checkpoint_and_names_the_tensor",
    ),
)
_in(
    "lazyckpt/providers/wrappers.py",
    (
        "a wrapper that gives other tensors at each call is lazy",
        "if not stable or",
        "if",
        WRAPPERS + "test_wrappers_that_do_not_tell_what_is_inside_are_eager",
    ),
    (
        "what the class of a wrapper raises fails the save",
        "    except Exception:  # from the wrapper's class",
        "    except StopIteration:  # from the wrapper's class",
        WRAPPERS + "test_wrappers_that_do_not_tell_what_is_inside_are_eager",
    ),
    (
        "wrappers without a version are lazy",
        " or torch.Tensor.is_inference(tensor)",
        "",
        WRAPPERS + "test_inference_tensors_inside_or_outside_are_eager",
    ),
    (
        "of two wrappers that share a tensor one is watched",
        ".extend((link, *above.get(id(wrapper), ())))",
        "[:] = (link, *above.get(id(wrapper), ()))",
        WRAPPERS + "test_what_two_wrappers_share_is_known_by_both",
    ),
)
_in(
    "lazyckpt/capture/averages.py",
    (
        "an average owns the model that trains, too",
        "return obj if average is None or average.module is None else getattr(obj, average.module, None)",
        "return obj",
        "test_averages.py::test_the_model_that_it_holds_too_belongs_to_no_average",
    ),
)
_in(
    "lazyckpt/capture/ownership.py",
    (
        "lazy without a step since the last save",
        "gated = steps != steps_before.get(id(owner), 0) or",
        "gated = True or",
        "test_gate.py::test_a_second_save_without_a_step_is_eager",
    ),
    (
        "an average that nobody watches is lazy although it was not updated",
        "or (known and watched and _are_on_host(owned))",
        "or known",
        "test_averages.py::test_without_pages_an_average_that_was_not_updated_is_eager",
    ),
    (
        "owners beyond the 62nd do not wait",
        "self.owners[owner] = bit, described",
        "self.owners[owner] = bit if number < _SHARED_BIT else 0, described",
        "test_snapshot.py::test_owners_beyond_the_62nd_wait_for_each_other",
    ),
    (
        "lazy inside a step",
        "gated = gated and not inside_step and",
        "gated = gated and",
        "test_gate.py::test_a_save_inside_an_open_step_is_eager",
    ),
    (
        "a part of a storage makes it lazy",
        ("return self.owners if self.eligible and (self.whole or _fill(self.tensors, nbytes)) else 0"),
        "return self.owners if self.eligible else 0",
        "test_snapshot.py::test_a_part_of_a_storage_is_eager_unless_the_parts_make_the_whole",
    ),
    (
        "one of two owners is enough",
        "self.eligible and other.eligible",
        "self.eligible or other.eligible",
        "test_gate.py::test_a_storage_with_two_owners_waits_for_both",
    ),
    (
        "only the last of two owners waits",
        "            self.owners | other.owners,",
        "            other.owners,",
        "test_gate.py::test_whichever_of_two_owners_steps_first_waits",
    ),
    (
        "writes through a wrapper are not found",
        "self.links.setdefault(identity, []).extend(through)",
        "pass",
        WRAPPERS + "test_a_write_outside_of_a_step_fails_the_checkpoint_and_names_the_tensor",
    ),
    (
        "tensors without a version are lazy",
        "gated and not tensor.is_inference()",
        "gated",
        "test_snapshot.py::test_inference_tensors_are_eager",
    ),
    (
        "expanded tensors own their storage",
        "    if not all(map(_is_dense, tensors)):\n        return False\n",
        "",
        "test_snapshot.py::test_an_expanded_tensor_in_optimizer_state_does_not_own_its_storage",
    ),
    (
        "views fill a storage whatever is between them",
        "        if begin > end:\n            return False\n        end = max(end, int(begin + size))",
        "        end += size",
        "test_snapshot.py::test_views_that_overlap_are_not_the_whole",
    ),
    (
        "an owner is known by its parameters, wherever they are now",
        "return Parameters(identities, addresses(parameters))",
        "return Parameters(identities, [])",
        "test_snapshot.py::test_an_optimizer_whose_parameter_was_given_the_memory_of_another_waits",
    ),
    (
        "an average that nobody trains rests between its updates",
        "                    self.guarded.update(identities)\n",
        "                    pass\n",
        "test_averages.py::test_an_average_that_takes_no_gradient_does_not_rest",
    ),
    (
        "membership in a group is evidence",
        "                if not guarded:\n                    eager.update",
        "                if False:\n                    eager.update",
        "test_evidence.py",
    ),
    (
        "embeddings that normalize in forward are lazy",
        "owners, eager = gate.owners()",
        "owners, eager = gate.owners()[0], set()",
        "test_evidence.py::test_embeddings_that_normalize_in_forward_are_eager",
    ),
    (
        "an optimizer does not wait for the frozen parameters in its groups",
        "self.frozen_owners[identity] = self.frozen_owners.get(identity, 0) | bit",
        "pass",
        "test_evidence.py::test_a_frozen_parameter_in_a_group_waits_for_its_optimizer",
    ),
)
_in(
    "lazyckpt/capture/evidence.py",
    (
        "a gradient is no evidence of anything",
        " and parameter.grad is not None",
        "",
        "test_evidence.py::test_what_gradient_hooks_update_is_eager",
    ),
    (
        "a parameter that was frozen stays lazy",
        " or not trained:",
        ":",
        "test_evidence.py::test_a_parameter_that_is_frozen_or_moved_has_to_earn_it_again",
    ),
    (
        "a parameter that was given other memory stays lazy",
        "mine.get(key) == address or any(table.get(key) == address for table in others)",
        "key in mine or any(key in table for table in others)",
        (
            "test_evidence.py::test_a_parameter_that_is_frozen_or_moved_has_to_earn_it_again "
            "test_snapshot.py::test_weights_that_are_swapped_by_pointer_for_an_average"
        ),
    ),
    (
        "what was earned once is earned for ever",
        "mine.pop(key, None)",
        "pass",
        "test_evidence.py::test_a_parameter_that_is_frozen_or_moved_has_to_earn_it_again",
    ),
    (
        "a wrapper that was given other memory inside stays lazy",
        "return at or address_inside(tensor)",
        "return at",
        WRAPPERS + "test_a_parameter_in_a_wrapper_is_lazy_once_it_had_a_gradient",
    ),
    (
        "what is inside of a wrapper has earned nothing, and is lazy",
        "for storages in storages_in(tree) for",
        "for storages in storages_in(tree)[:1] for",
        WRAPPERS + "test_a_parameter_in_a_wrapper_is_lazy_once_it_had_a_gradient",
    ),
    (
        "evidence outlives its parameter",
        "if len(mine) > len(tensors):",
        "if False:",
        "test_evidence.py::test_evidence_dies_with_its_parameter",
    ),
    (
        "state does not follow its parameter",
        "return _storages([tensors, [_state_of(optimizer, tensor) for tensor in tensors]])",
        "return _storages(tensors)",
        "test_evidence.py::test_state_follows_its_parameter",
    ),
)
_in(
    "lazyckpt/capture/gate.py",
    (
        "there is no gate in front of a step",
        ("            self._begin_writing([step], (optimizer,))\n            return None"),
        "            return None",
        WAITS,
    ),
    (
        "a step is not open",
        "                self._open[step.thread] = [step]\n",
        "                pass\n",
        "test_gate.py::test_a_save_inside_an_open_step_is_eager",
    ),
    (
        "a snapshot is forgotten when another one leaves the gate",
        ("        with self._changed:\n            self._pending = (*self._pending, pending)"),
        "        self._pending = (*self._pending, pending)",
        "test_gate.py::test_who_comes_while_others_leave_is_not_forgotten",
    ),
    (
        "nor behind a closure",
        ("            self._begin_writing([step], (optimizer,))\n            return loss"),
        "            return loss",
        "test_gate.py::test_a_closure_overlaps_and_then_the_step_waits",
    ),
    (
        "every optimizer is trusted to run its closure first",
        "if not callable(closure) or not is_of_torch(optimizer) or",
        "if not callable(closure) or",
        "test_gate.py::test_an_optimizer_that_moves_weights_before_its_closure_waits_up_front",
    ),
    (
        "hooks of an optimizer write before the closure",
        '        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),\n',
        "",
        "test_gate.py::test_the_wait_is_in_front_of_what_writes_before_the_closure",
    ),
    (
        "hooks of all optimizers write before the closure",
        "        *list(torch_optimizer._global_optimizer_pre_hooks.values())[1:],\n",
        "",
        "test_gate.py::test_the_wait_is_in_front_of_what_writes_before_the_closure",
    ),
    (
        "a step that is not torch's writes before the closure",
        "hooks[0] if hooks else _foreign_step(type(optimizer).step)",
        "hooks[0] if hooks else None",
        "test_gate.py::test_the_wait_is_in_front_of_what_writes_before_the_closure",
    ),
    (
        "a warning that is an error stops a step",
        "contextlib.suppress(Warning):  # where a filter",
        "contextlib.nullcontext():  # where a filter",
        "test_gate.py::test_a_warning_that_is_an_error_does_not_stop_a_step",
    ),
    (
        "older hooks write in front of the gate",
        "_global_optimizer_pre_hooks.move_to_end(hook.id, last=False)",
        "_global_optimizer_pre_hooks.move_to_end(hook.id)",
        "test_gate.py::test_the_gate_is_in_front_of_hooks_that_were_there_before",
    ),
    (
        "a strange optimizer does not wait",
        "            warn_of_foreign(optimizer, error)\n            self.wait_all()\n",
        "            warn_of_foreign(optimizer, error)\n",
        "test_gate.py::test_an_optimizer_that_is_not_quite_one_of_torchs_steps_and_waits",
    ),
    (
        "a strange optimizer that fails to open its step is still in the way of nobody",
        "            self._begin_writing([self._enter(optimizer, frame)], ())\n            return None\n",
        "            return None\n",
        "test_foreign.py::test_a_save_beside_a_strange_step_waits_for_it",
    ),
    (
        "a step fails by what a strange optimizer raises",
        "        except Exception as error:  # not as torch's are: it owns nothing, and waits for everything",
        "        except TypeError as error:  # not as torch's are: it owns nothing, and waits for everything",
        "test_foreign.py::test_training_is_as_without_us_and_checkpoints_are_whole",
    ),
    (
        "an optimizer loads without waiting",
        '    (torch.optim.Optimizer, "load_state_dict", lambda gate: gate.steps),\n',
        "",
        "test_gate.py::test_loading_in_the_middle_of_training_waits",
    ),
    (
        "a module loads without waiting",
        "self.modules.update(module.modules())",
        "pass",
        "test_gate.py::test_loading_in_the_middle_of_training_waits",
    ),
    (
        "a part of a module loads without waiting",
        "self.modules.update(module.modules())",
        "self.modules.add(module)",
        "test_gate.py::test_loading_in_the_middle_of_training_waits",
    ),
    (
        "wait_captured does not wait",
        ("        self.wait_all()\n        for optimizer"),
        "        for optimizer",
        "test_gate.py::test_loading_in_the_middle_of_training_waits",
    ),
    (
        "a guarded method does not wait",
        "            self._begin_writing(opened, owners)\n",
        "",
        "test_gate.py::test_guard_makes_an_average_lazy_and_its_update_wait",
    ),
    (
        "a known average is updated without waiting",
        "            with self.step(average):\n",
        "            if self._count(average) is None:\n",
        "test_averages.py::test_a_known_average_is_lazy_and_its_update_waits",
    ),
    (
        "a known average is copied to the model without waiting",
        "with self.step(Guarded(average), counted=False):",
        "with contextlib.nullcontext():",
        "test_averages.py::test_what_it_writes_to_the_model_waits_for_the_copies_of_the_model",
    ),
    (
        "a class derived from that of a known average is lazy",
        "if not averages.is_known(average):",
        "if averages._known.setdefault(type(average), averages.Average(())) is None:",
        "test_averages.py::test_a_class_derived_from_a_known_one_is_eager",
    ),
    (
        "a known average loads without waiting",
        "                self.watch(holder)\n",
        "                pass\n",
        "test_averages.py::test_a_model_that_loads_into_its_average_waits",
    ),
    (
        "an average whose update is captured into a CUDA graph is lazy",
        "                self._note_capture(owner)\n            self._begin",
        "            self._begin",
        "test_averages.py::test_an_update_that_is_captured_makes_it_eager",
    ),
    (
        "each guarded method of an object is an owner of its own",
        "others[0] if others else Guarded(obj)",
        "Guarded(obj)",
        "test_averages.py::test_guarded_twice_is_guarded_once",
    ),
    (
        "a guarded method is not open",
        "opened.append(self._enter(owner, frame))",
        "opened.append(_Step(owner, frame))",
        "test_gate.py::test_a_save_inside_a_guarded_method_is_eager",
    ),
    (
        "a step that raised stays open for this thread",
        "        with self._changed:\n            self._forget_raised()\n",
        "        with self._changed:\n",
        "test_gate.py::test_a_closure_that_raises_leaves_no_step_open test_gate.py::test_a_step_that_raised_is_over",
    ),
    (
        "a step that raised stays open for other threads",
        "        self._forget_raised()\n        saving = {",
        "        saving = {",
        f"{THREADS}::test_nobody_waits_for_a_step_that_raised",
    ),
    (
        "a save does not wait for the step of another thread",
        "while (other := self._writing_elsewhere(mine.thread)) is not None:",
        "while (other := None) is not None:",
        f"{THREADS}::test_a_save_waits_for_the_step_of_another_thread",
    ),
    (
        "a save waits for ever for a step",
        "                if time.monotonic() - begin > _PATIENCE_S:\n                    raise",
        "                if False:\n                    raise",
        f"{THREADS}::test_a_step_that_does_not_end_fails_the_save",
    ),
    (
        "a step does not wait for a save of another thread",
        "            elif arming.armed or waited_s < _GIVE_WAY_S:\n                return arming",
        "            elif waited_s < 0:\n                return arming",
        f"{THREADS}::test_who_would_write_during_a_save_waits_until_it_has_what_it_needs",
    ),
    (
        "a step inside of an open one waits for a save",
        "arming = None if nested else self",
        "arming = self",
        f"{THREADS}::test_a_step_inside_of_an_open_one_goes_on_while_a_save_waits",
    ),
    (
        "a step waits for the save of its own thread",
        "            if arming.thread == me or arming.broken is not None:",
        "            if arming.broken is not None:",
        f"{THREADS}::test_a_step_on_the_thread_that_saves_does_not_wait_for_it",
    ),
    (
        "a save waits for a closure of another thread",
        "                step.writing = False\n",
        "                pass\n",
        f"{THREADS}::test_a_save_does_not_wait_for_a_later_closure_either",
    ),
    (
        "a save waits for a thread that saves itself",
        "if thread != me and thread not in saving:",
        "if thread != me:",
        f"{THREADS}::test_saves_inside_of_steps_do_not_wait_for_each_other",
    ),
    (
        "behind its own save a step goes on during those of others",
        "            self._go_on_writing(mine.thread)\n",
        "",
        f"{THREADS}::test_a_step_that_goes_on_behind_its_own_save_waits_for_those_of_others",
    ),
    (
        "a step gives way to a save that waits for ever",
        "arming.armed or waited_s < _GIVE_WAY_S:",
        "True:",
        f"{THREADS}::test_a_step_that_waits_for_that_of_a_third_thread_goes_on",
    ),
    (
        "a step waits for ever for a state_dict that waits for it",
        "if arming.armed and arming.collecting and waited_s > _PATIENCE_S:",
        "if False:",
        f"{THREADS}::test_a_state_dict_that_waits_for_a_step_fails_the_save",
    ),
    (
        "a save is committed although a step went on",
        "                    if arming.broken is not None:\n                        raise",
        "                    if False:\n                        raise",
        f"{THREADS}::test_a_state_dict_that_waits_for_a_step_fails_the_save",
    ),
    (
        "a save that ends leaves steps waiting",
        "self._armings = [arming for arming in self._armings if arming is not mine]",
        "pass",
        f"{THREADS}::test_a_step_that_does_not_end_fails_the_save",
    ),
    (
        "schedule-free optimizers switch without waiting",
        "            _guard_switches(type(optimizer))\n",
        "            pass\n",
        "test_switching.py::test_a_save_between_eval_and_train_commits",
    ),
    (
        "an optimizer that steps by another's does not wait",
        "                _guard_switches(type(owner))\n",
        "                pass\n",
        "test_switching.py::test_sam test_switching.py::test_a_save_between_eval_and_train_commits",
    ),
    (
        "schedule-free optimizers wait although they switch to the mode that they have",
        "        if mode is not None and _is_in_mode(self, mode):\n",
        "        if False:\n",
        "test_switching.py::test_a_switch_to_the_mode_that_it_has_waits_for_nothing",
    ),
    (
        "schedule-free optimizers are taken to have the mode that they switch to",
        'group.get("train_mode")) is train for',
        "train) is train for",
        "test_switching.py::test_a_save_between_eval_and_train_commits",
    ),
    (
        "an optimizer and a wrapper around it are two owners",
        "                seen.append(inner)\n",
        "                pass\n",
        "test_switching.py::test_a_switch_through_a_wrapper_is_one_of_the_optimizer_inside",
    ),
    (
        "a forked child waits for its parent",
        "os.register_at_fork(after_in_child=gate.forget)\n",
        "",
        "test_gate.py::test_a_forked_child_trains_on_and_the_parent_does_too",
    ),
)
_in(
    "lazyckpt/saver.py",
    (
        "save does not wait for eager bytes",
        "job.wait_eager()",
        "pass",
        (
            "test_gate.py::test_buffers_that_change_in_forward_are_eager "
            "test_gate.py::test_without_guard_an_average_is_eager test_saver.py test_consistency.py"
        ),
    ),
    ("the gate never hears of a snapshot", "gate.add(snapshot)", "pass", WAITS),
    (
        "a second thread closes inside a save",
        "if self._callers or gate",
        "if gate",
        "test_reentry.py::test_a_second_thread_is_refused_inside_a_call_and_served_after_it",
    ),
    (
        "a save and steps of other threads do not exclude each other",
        "with gate.arming(handle.path, handle.step):",
        "with contextlib.nullcontext():",
        "test_gate_threads.py::test_saves_on_one_thread_and_steps_on_another",
    ),
    (
        "saved inside a capture",
        "if devices.capturing():",
        "if False:",
        "test_cuda_training.py::test_a_captured_step_makes_its_optimizer_eager_until_somebody_waits_by_hand",
    ),
    (
        "an interrupted save stays behind the gate",
        "                    gate.discard(snapshot)\n                    if trace",
        "                    if trace",
        "test_checkpointer.py::test_a_save_that_never_reached_the_background_leaves_the_gate",
    ),
    (
        "a forked child uses the Saver of its parent",
        "if os.getpid() != self._pid:\n            raise",
        "if False:\n            raise",
        "test_saver.py::test_after_close_and_in_a_child",
    ),
    (
        "a module that is watched loads without waiting",
        "gate.watch(module)",
        "pass",
        "test_saver.py::test_modules_that_are_watched_wait_before_they_load",
    ),
    (
        "a folder is replaced with what others put there",
        "keep_others=True",
        "keep_others=False",
        "test_saver.py integrations/test_accelerate.py::"
        "test_a_folder_of_ones_own_is_replaced_whole_and_keeps_what_others_put_there",
    ),
    (
        "lack of space is not looked for",
        "self._check_space(sum(sizes), handle)",
        "pass",
        "test_checkpointer.py::test_lack_of_space_is_found_before_training_is_blocked",
    ),
    (
        "an interrupted save is published",
        'job.fail(errno.ECANCELED, "save() was interrupted")',
        "pass",
        "test_checkpointer.py::test_an_interrupted_save_is_not_published_and_nothing_hangs",
    ),
)

_in(
    "lazyckpt/pipeline/reentry.py",
    (
        "a handler saves inside a save",
        "    if outer is not None:\n",
        "    if False:\n",
        "test_reentry.py::test_what_a_state_dict_calls_inside_save_and_restore_is_refused",
    ),
    (
        "a second thread saves inside a save",
        'callers.setdefault("inside", me) != me',
        "False",
        "test_reentry.py::test_a_second_thread_is_refused_inside_a_call_and_served_after_it",
    ),
    (
        "after Ctrl-C a thread is inside a save for ever",
        "                _inside.pop(me, None)\n",
        "                if False:\n                    pass\n",
        "test_reentry.py::test_what_a_state_dict_calls_inside_save_and_restore_is_refused",
    ),
    (
        "a handler saves where its thread has a lock",
        "outer is None and gate.is_held()",
        "False",
        "test_reentry.py::test_a_handler_that_interrupts_where_this_thread_has_a_lock",
    ),
    (
        "a forked child is inside what its parent is",
        "os.register_at_fork(after_in_child=_forget_others)\n",
        "",
        "test_reentry.py::test_a_forked_child_is_not_inside_what_its_parent_is",
    ),
)
_in(
    "lazyckpt/pipeline/handle.py",
    (
        "a handle is waited for inside a save",
        "if timeout is None and not self.done():",
        "if False:",
        "test_reentry.py::test_a_handle_is_not_waited_for_inside_save",
    ),
)
_in(
    "lazyckpt/staged.py",
    (
        "a folder whose save was interrupted stays",
        "if handle._snapshot is None:",
        "if handle.done():",
        "test_saver.py::test_a_folder_whose_save_is_interrupted_is_gone",
    ),
    (
        "a staged file may lie elsewhere",
        ' or Path(name).is_absolute() or ".." in parts',
        "",
        "test_saver.py::test_names_outside_the_folder_are_refused",
    ),
    (
        "a staged folder is not discarded",
        "            staging.discard()\n\n    def __reduce__",
        "            pass\n\n    def __reduce__",
        "test_saver.py::test_a_folder_that_is_not_saved_is_gone",
    ),
)
_in(
    "lazyckpt/checkpointer.py",
    (
        "a run follows os.chdir()",
        "self.directory = paths.local(directory)",
        "self.directory = Path(directory)",
        "test_checkpointer.py::test_a_change_of_the_working_folder_moves_no_checkpoint",
    ),
    (
        "a checkpoint is numbered after those of its own process only",
        "max(self._sequence, newest) + 1",
        "self._sequence + 1",
        "test_checkpointer.py::test_two_that_save_into_one_folder",
    ),
    (
        "retention removes what another process saves",
        "(c.step, c.sequence) in self._ours]",
        "True]",
        "test_checkpointer.py::test_two_that_save_into_one_folder",
    ),
    (
        "restore does not wait for its own saves",
        "        self._saver.drain()\n        gate.wait_all()",
        "        gate.wait_all()",
        "test_restore.py::test_restore_waits_for_saves_in_flight",
    ),
    (
        "restore does not wait for the copies of others",
        "gate.wait_all()  # other",
        "pass  # other",
        "test_checkpointer.py::test_restoring_by_one_checkpointer_waits_for_the_copies_of_another",
    ),
    (
        "frozen parameters are trusted across a restore",
        "self._saver.forget_frozen()",
        "pass",
        "test_snapshot.py::test_after_a_restore_frozen_parameters_earn_their_laziness_anew",
    ),
    (
        "a forked child uses the Checkpointer of its parent",
        "if os.getpid() != self._pid:",
        "if False:",
        "test_checkpointer.py::test_use_in_a_forked_child",
    ),
)

# sharded.py: no part of a tensor passes for the whole

SHARDED = "test_sharded.py::test_it_is_found_and_named_wherever_it_is"
_in(
    "lazyckpt/providers/sharded.py",
    (
        "a sharded tensor is saved",
        "size > 1 and not how.is_replicate() for",
        "False for",
        SHARDED,
    ),
    (
        "what is still to be summed is saved",
        "not how.is_replicate()",
        "how.is_shard()",
        "test_sharded.py::test_what_is_not_whole_here_is_refused",
    ),
    (
        "a ShardedTensor is saved",
        'if cls.__name__ == "ShardedTensor":',
        'if cls.__name__ == "ShardedTensor":\n            return None',
        "test_sharded.py::test_a_sharded_tensor_of_fsdp1_is_refused",
    ),
)
_in(
    "lazyckpt/providers/pickles.py",
    (
        "a pickle holds a part of a tensor",
        "            refuse_part(obj, self._root)\n        return NotImplemented\n\n    def _note",
        "            pass\n        return NotImplemented\n\n    def _note",
        SHARDED,
    ),
    (
        "a copy of a provider takes addresses of this process along",
        "        return Skeleton, ()  # a copy of a provider keeps its own\n",
        "        return object.__reduce_ex__(self, 4)  # type: ignore[return-value]\n",
        "test_pickling.py::test_a_copy_of_a_provider_knows_nothing_of_addresses_in_this_process",
    ),
    (
        "a pickle by torch's reducers holds a part of a tensor",
        "            refuse_part(obj, self._root)\n        return NotImplemented\n\n\ndef _placeholder",
        "            pass\n        return NotImplemented\n\n\ndef _placeholder",
        SHARDED,
    ),
)
_in(
    "lazyckpt/pipeline/plan.py",
    (
        "a safetensors file holds a part of a tensor",
        "            refuse_part(tensor, tensors)\n",
        "",
        "test_sharded.py::test_it_is_refused_in_safetensors_too",
    ),
)
_in(
    "lazyckpt/checkpointer.py",
    ("a sharded model is tracked", "refuse_parts(obj, name)", "pass", "test_sharded.py::test_track_refuses_it"),
)

# preemption.py, integrations: who else has to wait

_in(
    "lazyckpt/pipeline/preemption.py",
    (
        "a signal does not wait for the commit",
        "wait_for(handles, self._deadline)",
        "pass",
        "test_preemption.py::test_a_handler_that_was_there_before_is_called_after_the_commit",
    ),
    (
        "it waits for ever",
        "wait_for(handles, self._deadline)",
        "concurrent.futures.wait(handles)",
        "test_preemption.py::test_after_the_deadline_it_gives_up_and_the_checkpoint_before_stands",
    ),
    (
        "so does a second one",
        "first = number not in self._committing and not",
        "first = not",
        "test_preemption.py::test_a_second_signal_does_not_wait",
    ),
    (
        "the handler itself waits",
        "_thread.start_new_thread(self._commit, (number, on_top))",
        "self._commit(number, on_top)",
        "test_preemption.py::test_a_lock_that_the_main_thread_holds_does_not_hold_up_the_commit",
    ),
    (
        "who handled the signal before is not called",
        "if callable(former):",
        "if False:",
        "test_preemption.py::test_a_handler_that_was_there_before_is_called_after_the_commit",
    ),
    (
        "a handler that came later is cut short",
        "            if not on_top:\n                self._committing.discard(number)\n            else:",
        "            if True:",
        "test_preemption.py::test_a_handler_that_is_installed_later_ends_the_process_its_own_way",
    ),
    (
        "the signal is sent once",
        "            time.sleep(pause_s)",
        "            break",
        "test_preemption.py::test_a_signal_that_does_not_end_a_wait_is_sent_again",
    ),
    (
        "a handler that came later is put out of its place",
        "            if signal.getsignal(number) == self._handle:\n",
        "            if True:\n",
        "test_preemption.py::test_close_puts_the_former_handler_back",
    ),
)
_in(
    "lazyckpt/integrations/lightning.py",
    (
        "weights are swapped before they are copied",
        "            lazyckpt.wait_captured()\n",
        "            pass\n",
        "integrations/test_lightning.py::test_what_is_saved_is_not_what_was_swapped_in_afterwards",
    ),
    (
        "what is loaded is not waited for",
        "        try:\n            self.wait()\n        finally:\n            if torch",
        "        try:\n            pass\n        finally:\n            if torch",
        "integrations/test_lightning.py::test_a_callback_finds_what_was_just_saved",
    ),
    (
        "a checkpoint is removed before the next one is durable",
        "        saver.remove(target)\n",
        "        super().remove_checkpoint(path)\n",
        "integrations/test_lightning.py::test_the_old_checkpoint_stays_until_the_new_one_is_durable",
    ),
    (
        "what is saved again is removed",
        "        if target in self._removed:\n            self.wait()  # or",
        "        if False:\n            self.wait()  # or",
        "integrations/test_lightning.py::test_a_path_is_saved_to_again_after_its_removal",
    ),
    (
        "a link points at what is not there yet",
        "pending[-1].add_done_callback(make)",
        "make(None)",
        "integrations/test_lightning.py::test_a_link_to_the_last_never_dangles",
    ),
    (
        "an older link takes the place of a newer one",
        "number < self._linked.get(name, 0) or",
        "False or",
        "integrations/test_lightning.py::test_an_older_link_does_not_replace_a_newer_one",
    ),
    (
        "a link points at what was not saved",
        " or not os.path.exists(target):",
        ":",
        "integrations/test_lightning.py::test_a_save_that_fails_at_once_costs_neither_the_old_checkpoint_nor_the_link",
    ),
    (
        "a checkpoint goes although the one after it failed at once",
        "            self._failed_at_once = target\n",
        "",
        "integrations/test_lightning.py::test_a_save_that_fails_at_once_costs_neither_the_old_checkpoint_nor_the_link",
    ),
    (
        "a checkpoint goes before last can do without it",
        "    if callback.save_last:\n",
        "    if False:\n",
        "integrations/test_lightning.py::test_no_checkpoint_goes_before_last_can_do_without_it",
    ),
    (
        "training begins anew where last dangles",
        " or any(map(os.path.exists, found)):",
        " or True:",
        "integrations/test_lightning.py::test_without_last_training_goes_on_from_the_newest_checkpoint",
    ),
    (
        "a damaged checkpoint stands in for last",
        'passed over: {error}")\n        return False',
        'passed over: {error}")\n        return True',
        "integrations/test_lightning.py::test_what_is_not_whole_does_not_stand_in_for_last",
    ),
    (
        "who looks for the best model does not find it",
        "        self._wait_durable(trainer)  # what",
        "        pass  # what",
        "integrations/test_lightning.py::test_who_looks_for_the_best_model_at_the_end_of_training_finds_it",
    ),
    (
        "what is saved on an exception is still on its way",
        "io._attended = False  # those",
        "pass  # those",
        "integrations/test_lightning.py::test_what_is_saved_on_an_exception_is_durable_at_once",
    ),
    (
        "a signal handler saves with the Saver that it interrupted",
        "elif self._saving or target.name.startswith(_SLURM_PREFIX):",
        "elif False:",
        "integrations/test_lightning.py::test_a_signal_handler_of_ones_own_may_save_in_the_middle_of_a_save "
        "integrations/test_lightning.py::test_slurm_requeues_with_a_durable_checkpoint",
    ),
    (
        "what a signal handler saved has no name after a power cut",
        "commit.publish_file(unfinished, target)",
        "os.replace(unfinished, target)",
        "integrations/test_lightning.py::test_what_is_saved_at_once_survives_a_power_cut_with_its_folders",
    ),
    (
        "nor has its folder",
        "    commit.make_folder(target.parent)\n    lazyckpt.save(checkpoint, unfinished)",
        "    target.parent.mkdir(parents=True, exist_ok=True)\n    lazyckpt.save(checkpoint, unfinished)",
        "integrations/test_lightning.py::test_what_is_saved_at_once_survives_a_power_cut_with_its_folders",
    ),
    (
        "nor that of what is saved without a Saver",
        "            commit.make_folder(target.parent)\n            lazyckpt.save(checkpoint, target)",
        "            target.parent.mkdir(parents=True, exist_ok=True)\n            lazyckpt.save(checkpoint, target)",
        "integrations/test_lightning.py::test_what_is_saved_at_once_survives_a_power_cut_with_its_folders",
    ),
)
_in(
    "lazyckpt/integrations/accelerate.py",
    (
        "load_state does not wait for what was saved",
        "                saver.wait()\n            if",
        "                pass\n            if",
        "integrations/test_accelerate.py::test_another_accelerator_of_the_process_waits_for_what_it_loads",
    ),
    (
        "end_training does not wait",
        "        try:\n            self.wait()\n        finally:\n            self._own",
        "        try:\n            pass\n        finally:\n            self._own",
        "integrations/test_accelerate.py::test_a_failure_in_the_background_is_raised_by_end_training",
    ),
    (
        "an unpickled Accelerator sees no step before its first save",
        "        gate.install()  # only optimizers that were seen to step are copied lazily\n",
        "",
        "integrations/test_accelerate.py::test_in_a_new_process_an_unpickled_accelerator_saves",
    ),
    (
        "an unpickled Accelerator calls our methods as its own",
        "self._replaced.get(name) or functools.partial(getattr(type(self._accelerator), name), self._accelerator)",
        "self._replaced.get(name) or getattr(self._accelerator, name)",
        "integrations/test_accelerate.py::test_an_unpickled_accelerator_trains_saves_and_resumes",
    ),
    (
        "total_limit removes before the next one is durable",
        "            saver.remove(folder / name)\n",
        "            __import__('shutil').rmtree(folder / name)\n",
        "integrations/test_accelerate.py::test_total_limit_removes_the_old_one_only_when_the_new_one_is_durable",
    ),
    (
        "without training save_state returns before it is there",
        "if not self.last_save.in_training:",
        "if False:",
        "integrations/test_accelerate.py::test_a_state_that_is_not_being_trained_is_there_when_save_state_returns",
    ),
    (
        "the folder lies among the checkpoints before it is whole",
        "saver.stage(target, inside=self._staging_folder(target))",
        "saver.stage(target)",
        "integrations/test_accelerate.py::test_only_whole_checkpoints_are_ever_seen_among_the_checkpoints",
    ),
    (
        "a rank that fails is alone with that",
        "            if what is not None:\n                raise",
        "            if False:\n                raise",
        "integrations/test_accelerate.py::test_a_rank_that_fails_fails_the_save_on_all_ranks",
    ),
    (
        "what another node wrote is not synced",
        "commit.sync_path(Path(parent, name))",
        "pass",
        "integrations/test_accelerate.py::test_what_another_node_wrote_is_synced_there",
    ),
    (
        "load_state does not finish what a killed run was publishing",
        "_finish(Path(input_dir).expanduser())",
        "pass",
        "integrations/test_accelerate.py::test_load_state_finishes_what_was_cut_off_in_a_volume",
    ),
    (
        "a number that total_limit has condemned is refused",
        "            saver.wait()  # total_limit",
        "            pass  # total_limit",
        "integrations/test_accelerate.py::test_a_resumed_run_does_not_run_into_what_total_limit_removes",
    ),
)
EAGER = "test_eager.py::test_not_of_what_no_guard_would_help"
_in(
    "lazyckpt/capture/eager.py",
    (
        "a warning advises to guard what nothing writes to",
        "if first.get(identity, crc) != crc",
        "if identity in first",
        EAGER,
    ),
    ("a warning advises to guard buffers", "written - _buffers(modules)", "written", EAGER),
    (
        "a warning advises to guard in a run that does not step",
        " if snapshot.in_training else 0",
        "",
        "test_eager.py::test_not_where_no_step_was_taken_between_the_saves",
    ),
    (
        "a warning that is an error fails the save",
        "with contextlib.suppress(Warning):  # where",
        "with contextlib.nullcontext():  # where",
        "test_eager.py::test_a_filter_that_makes_errors_of_warnings_fails_no_save",
    ),
)
_in(
    "lazyckpt/capture/snapshot.py",
    (
        "a warning advises to guard what an optimizer has in its groups",
        "compress(count(), map(not_, map(self._owned.__contains__, self._identities)))",
        "range(len(self.sizes))",
        EAGER,
    ),
    (
        "a warning advises to guard what was torn",
        " and not is_torn(self._identities[source])",
        "",
        "test_eager.py::test_not_of_what_was_torn",
    ),
)
_in(
    "lazyckpt/integrations/redirect.py",
    (
        "a hook saves the weights that it swapped back",
        "                self._redirected.keep(storage)\n",
        "                pass\n",
        f"{HOOKS}::test_a_hook_that_swaps_weights_for_its_file_saves_what_it_had_then",
    ),
    (
        "a hook saves a tensor that was given other memory",
        "    tensor = tensor.detach()",
        "    tensor = tensor",
        f"{HOOKS}::test_a_hook_that_swaps_weights_for_its_file_saves_what_it_had_then",
    ),
    (
        "a file that a hook writes twice fails the save",
        "        with contextlib.suppress(FileNotFoundError):\n            os.unlink(path)\n",
        "",
        f"{HOOKS}::test_the_last_that_a_hook_writes_under_a_name_is_saved",
    ),
    (
        "what lazyckpt cannot save as safetensors would does not reach safetensors",
        "not _are_plain(tensors, metadata):",
        "False:",
        f"{HOOKS}::test_what_safetensors_refuses_a_hook_is_told",
    ),
    (
        "a hook resizes a storage, and its values are lost",
        "            gate.add(redirected)\n",
        "",
        f"{REDIRECT}::test_memory_that_a_hook_gives_back_is_kept_before",
    ),
    (
        "a hook writes to a wrapper that shows nothing of its inside",
        "                self._redirected.wait_all()\n",
        "                pass\n",
        f"{REDIRECT}::test_a_write_through_a_subclass_keeps_what_the_file_was_given",
    ),
    (
        "what another thread writes after save_file gets into the file",
        "_version(tensor) != self.version or ",
        "",
        f"{REDIRECT}::test_a_write_that_only_its_version_tells_fails_the_save",
    ),
    (
        "safetensors under another name is written as torch.save would",
        ' or not name.endswith(".safetensors"):',
        ":",
        f"{REDIRECT}::test_a_name_that_does_not_tell_the_format_is_left_to_safetensors",
    ),
    (
        "compiled code in a hook writes later values into the file",
        'torch.compiler.set_stance("force_eager")',
        "contextlib.nullcontext()",
        f"{REDIRECT}::test_what_compiled_code_writes_does_not_get_into_the_file",
    ),
    (
        "a module that is imported in a hook keeps its tensors alive",
        "        add_tensors = None  #",
        "        pass  #",
        f"{REDIRECT}::test_a_module_imported_in_a_hook_keeps_nothing_alive",
    ),
)
_in(
    "lazyckpt/integrations/transformers.py",
    (
        "what a killed Trainer staged stays until a save",
        "            _tidy(_staging_folder(args))\n",
        "            pass\n",
        "integrations/test_transformers.py::test_a_run_that_never_saves_removes_what_a_killed_one_left",
    ),
    (
        "training ends before all is durable",
        "    callback.close()\n    _barrier(trainer)\n    best",
        "    _barrier(trainer)\n    best",
        "integrations/test_transformers.py::test_a_save_that_fails_raises_at_the_end_of_training",
    ),
    (
        "an exception loses what was saved",
        "            callback.close()  # what",
        "            pass  # what",
        "integrations/test_transformers.py::test_an_exception_in_training_leaves_the_checkpoint_whole",
    ),
    (
        "callbacks hear of a folder that is not there yet",
        "                save.on_save = True\n                return True",
        "                save.on_save = True\n                return False",
        "integrations/test_transformers.py::test_on_save_comes_when_the_folder_is_there",
    ),
    (
        "a folder that is not there yet is pushed",
        '_attribute(trainer, "_push_from_checkpoint", lambda checkpoint_folder: None)',
        "contextlib.nullcontext()",
        "integrations/test_transformers.py::test_a_push_comes_when_the_folder_is_there",
    ),
    (
        "an old checkpoint is removed in the sight of others",
        "            self._saver.remove(Path(old).absolute())\n",
        "            __import__('shutil').rmtree(old)\n",
        "integrations/test_transformers.py::test_old_checkpoints_are_removed_behind_the_back_of_training",
    ),
    (
        "a checkpoint that failed is announced",
        "            if Future.exception(save.handle) is None:\n                self._announce_one",
        "            if True:\n                self._announce_one",
        "integrations/test_transformers.py::test_an_old_checkpoint_stays_if_the_new_one_fails",
    ),
    (
        "a just-in-time checkpoint is on its way when the process ends",
        "handle = self.newest = staged.save(blocking=blocking)",
        "handle = self.newest = staged.save()",
        "integrations/test_transformers.py::test_a_just_in_time_checkpoint_is_durable_at_once",
    ),
    (
        "a sentinel stays in the place of a checkpoint",
        "    sentinel.unlink()\n",
        "",
        "integrations/test_transformers.py::test_a_just_in_time_checkpoint_is_durable_at_once",
    ),
    (
        "the best model is loaded before it is there",
        "    callback.wait()\n    _barrier(trainer)\n    return",
        "    _barrier(trainer)\n    return",
        "integrations/test_transformers.py::test_who_goes_back_to_a_checkpoint_during_training_finds_it",
    ),
    (
        "the last checkpoint is removed in place",
        '"rmtree": _remove_at_once',
        '"rmtree": shutil.rmtree',
        "integrations/test_transformers.py::"
        "test_whenever_the_process_ends_the_last_checkpoint_and_the_best_that_it_names_are_there",
    ),
    (
        "the folder is saved before every rank has written its part",
        "        _barrier(trainer)  # every rank has written its part\n",
        "",
        "integrations/test_transformers.py::test_two_ranks_save_one_folder",
    ),
)

# archive.py, reading.py, restore.py, catalog.py, functional.py, cli/verify.py: nothing damaged or hostile gets in

_in(
    "lazyckpt/reading/ranges.py",
    (
        "a record's checksum is not compared",
        "if bad:",
        "if False:",
        (
            "test_functional.py::test_a_damaged_record_is_named "
            "test_restore.py::test_a_damaged_newest_is_passed_over_with_a_warning_that_names_the_reason"
        ),
    ),
    (
        "a forked child uses the engine of its parent",
        "return _engine_of(os.getpid())",
        "return _engine_of(0)",
        "test_functional.py::test_a_forked_child_saves_and_loads",
    ),
)
_in(
    "lazyckpt/reading/archive.py",
    (
        "nor the pickle's",
        "record.crc32 not in (None, zlib.crc32(data))",
        "False",
        "test_archive.py::test_a_damaged_pickle_is_found_by_its_checksum",
    ),
    (
        "what only the full unpickler reads is taken for damage",
        "crc32 is not None and _BEYOND.search(str(error)):",
        "crc32 is None and _BEYOND.search(str(error)):",
        "test_restorable.py::test_what_names_no_class_is_not_taken_for_damage",
    ),
    (
        "an archive of another byte order is read as one of ours",
        'self._read_small("byteorder") != sys.byteorder.encode()',
        "False",
        "test_archive.py::test_another_byte_order_is_left_to_torch",
    ),
    (
        "a small record may be large",
        'if name != "data.pkl" and record.nbytes > _MAX_SMALL_BYTES:',
        "if False:",
        _attacks("zips.sparse_byteorder"),
    ),
    (
        "any version is read",
        r'if not re.fullmatch(rb"[0-9]{1,2}\n?", version) or not 1',
        "if False and not 1",
        _attacks("zips.version_of_the_future"),
    ),
    (
        "a small record may say anything",
        "if name in self._records and not re.fullmatch(pattern, self._read_small(name)):",
        "if False:",
        _attacks("zips.alignment_in_words"),
    ),
    (
        "a storage is named by a number",
        "if not isinstance(key, str | bytes):",
        "if False:",
        _attacks("pickles.storage_by_a_number"),
    ),
    (
        "a tensor may be larger than its record",
        "if slot.final is not None and slot.final.nbytes() != slot.record.nbytes:",
        "if False:",
        "test_archive.py::test_a_pickle_that_lies_about_its_storages",
    ),
    (
        "a storage may be larger than its record",
        "if record is None or record.nbytes != nbytes:",
        "if record is None:",
        "test_archive.py::test_a_pickle_that_lies_about_its_storages",
    ),
    (
        "whatever is unpickled finds no bytes",
        ("            raise _NeedsBytes\n        return line"),
        ("            pass\n        return line"),
        "test_archive.py",
    ),
    (
        "indices of sparse tensors may lie outside",
        "check_sparse_tensor_invariants(weights_only or _checks_sparse_tensors())",
        "check_sparse_tensor_invariants(_checks_sparse_tensors())",
        _attacks("pickles.sparse_indices_outside", "pickles.sparse_rows_outside"),
    ),
    (
        "sparse tensors are not checked",
        "torch._utils._validate_loaded_sparse_tensors()",
        "pass",
        "test_archive.py::test_sparse_tensors_are_checked_as_torch_checks_them",
    ),
)
_in(
    "lazyckpt/formats/pickle_guard.py",
    (
        "a key may be nested for ever",
        "            if depth > _MAX_DEPTH:",
        "            if False:",
        _attacks("pickles.hash_of_a_deep_tuple"),
    ),
    (
        "a key may be shared for ever",
        "            self._charge(_ITEM_BYTES * len(value))",
        "            pass",
        _attacks("pickles.hash_of_a_wide_tuple", "pickles.sets_of_one_list"),
    ),
    (
        "a tensor may be set to more than its storage",
        "in (torch.Tensor, torch.nn.Parameter) and len(stack[-1]) == 4:",
        "in () and len(stack[-1]) == 4:",
        _attacks("pickles.tensor_set_to_more_than_there_is", "pickles.parameter_set_to_more_than_there_is"),
    ),
    (
        "a path may be joined of one long name again and again",
        "isinstance(argument, str | bytes | bytearray)))",
        "        pass",
        _attacks("pickles.path_of_one_long_name"),
    ),
    (
        "arguments may be an array of rows without end",
        "        elif type(stack[-1]) is not tuple:  # what may be endless when it is unpacked",
        "        elif False:",
        _attacks("pickles.rows_of_nothing_as_arguments"),
    ),
    (
        "a set may be made of whatever can be iterated",
        "        elif function in _COLLECTIONS:",
        "        elif False:",
        _attacks("pickles.rows_of_nothing_as_a_size"),
    ),
    (
        "keys set at once are not looked at",
        "self._check_depth(stack[::2])",
        "pass",
        _attacks("pickles.hash_of_a_deep_tuple_among_others"),
    ),
    ("nor those set alone", "self._check_depth(stack[-2:-1])", "pass", _attacks("pickles.hash_of_a_deep_tuple")),
    ("nor arguments", "self._check_depth(stack[-1:])", "pass", _attacks("pickles.hash_of_a_deep_tuple_in_a_set")),
    (
        "a view may be larger than its storage",
        "if 0 not in size and last >= storage._size():",
        "if False:",
        _attacks("pickles.view_by_stride", "pickles.view_by_offset"),
    ),
    (
        "a bytearray may be as large as it says",
        "fine = all(isinstance(argument, bytes | str) for argument in arguments)",
        "fine = True",
        _attacks("pickles.bytearray_of_a_number"),
    ),
    (
        "so may a tensor",
        "fine = not arguments  # a number would be a length",
        "fine = True",
        _attacks("pickles.tensor_of_a_number", "pickles.untyped_storage_of_a_number"),
    ),
    (
        "text may have any encoding",
        "fine = len(arguments) < 2 or (isinstance(arguments[1], str) and arguments[1] in _ENCODINGS)",
        "fine = True",
        _attacks("pickles.slow_codec"),
    ),
    (
        "a call inside a call is not looked at",
        "while function is torch._tensor._rebuild_from_type_v2 and len(arguments) > 2:",
        "while False:",
        _attacks("pickles.bytearray_by_rebuild"),
    ),
)
_in(
    "lazyckpt/formats/pickle_guard.py",
    (
        "an operand that looks like an opcode is taken for one",
        "return self._opcode == at",
        "return True",
        "test_safe_globals.py::test_places_in_the_memo_that_look_like_opcodes",
    ),
    (
        "numbers of NumPy wrap in a view",
        "(index(n) - 1) * index(step)",
        "(n - 1) * step",
        _attacks("pickles.view_of_wrapping_numbers"),
    ),
    (
        "NumPy is called in any way",
        "elif not allows_call(function, arguments, pickled=direct and not new):",
        "elif False:",
        _attacks("pickles.array_of_nobodys_memory", "pickles.bytes_of_a_number", "pickles.date_out_of_range"),
    ),
    (
        "NumPy is called by other functions",
        "pickled=direct and not new",
        "pickled=not new",
        _attacks("pickles.array_state_by_rebuild"),
    ),
    (
        "states of NumPy are set unseen",
        "if not allows_state(stack[-2], stack[-1]):",
        "if False:",
        _attacks("pickles.dtype_of_any_size", "pickles.array_built_twice"),
    ),
)
_in(
    "lazyckpt/formats/safe_globals.py",
    (
        "NumPy's own types may be changed",
        "and arguments[1:] == (False, True)",
        "and True",
        _attacks("pickles.dtype_of_everybody"),
    ),
    (
        "a type may have any state",
        "dtype.newbyteorder(order).__reduce__()[2] == state",
        "True",
        _attacks("pickles.dtype_of_any_size"),
    ),
    (
        "an array may get another state",
        "version == 1 and array.shape == (0,) and",
        "version == 1 and",
        _attacks("pickles.array_built_twice"),
    ),
    ("items may be empty", "and dtype.itemsize > 0", "and True", _attacks("pickles.array_of_empty_items")),
    (
        "an array may be larger than its memory",
        "and math.prod(shape) * dtype.itemsize == nbytes",
        "and True",
        _attacks("pickles.array_beyond_its_storage"),
    ),
    (
        "what the user allows is restricted",
        "    if _is_in(function, _allowed_by_user()):\n        return True\n",
        "",
        "test_safe_globals.py::test_what_the_user_allows_is_not_restricted",
    ),
)
_in(
    "lazyckpt/providers/objects.py",
    (
        "a state that restore cannot read is saved",
        "            self.refuse_unrestorable(parts, table)\n",
        "            pass\n",
        "test_restorable.py",
    ),
    (
        "only the first save is looked at",
        "if not skeleton.kinds.keys() <= skeleton.accepted.keys():",
        "if not skeleton.accepted:",
        "test_restorable.py::test_what_comes_later_is_found_then",
    ),
)
_in(
    "lazyckpt/providers/pickles.py",
    (
        "a dtype with metadata is taken for a plain one",
        'getattr(obj, "metadata", None)',
        "False",
        "test_restorable.py::test_a_dtype_with_metadata_is_refused_after_a_plain_one",
    ),
)
_in(
    "lazyckpt/providers/rng.py",
    (
        "NumPy reads beyond its words",
        'or not 0 <= state["pos"] <= 624:',
        "or False:",
        "test_rng.py::test_malformed_state_is_one_typed_error_and_changes_nothing",
    ),
)
_in(
    "lazyckpt/providers/loader.py",
    (
        "a position beyond the end is found at the first batch",
        "yielded > (here := len(self._loader)):",
        "not (here := 1):",
        "test_restorable.py::test_a_position_beyond_the_end_of_a_loader_touches_nothing",
    ),
    (
        "a length that may be an estimate is trusted",
        'all(type(part).__module__.startswith("torch.utils.data.") for part in parts)',
        "all(True for part in parts)",
        "test_loader.py::test_a_length_that_may_be_an_estimate_is_not_trusted",
    ),
)
_in(
    "lazyckpt/providers/restorable.py",
    (
        "the check hands out live storages",
        "copies[key] = _copy(live[key])",
        "copies[key] = live[key]",
        "test_restorable.py::test_looking_whether_it_can_be_read_changes_nothing",
    ),
)
_in(
    "lazyckpt/providers/composite.py",
    (
        "opcodes that restore cannot read are saved",
        'refuse_unreadable(None, "", opcodes[name], table)',
        "pass",
        "test_restorable.py::test_a_provider_that_writes_opcodes_is_checked",
    ),
    (
        "what a failed load has overwritten is not told",
        "            overwritten.add(name)\n",
        "",
        "test_restorable.py::test_a_load_that_raises_midway_says_what_is_overwritten",
    ),
)
_in(
    "lazyckpt/providers/training.py",
    (
        "keys that nothing loads are saved",
        "if keys := self._unclaimed(state):",
        "if keys := []:",
        "test_restorable.py::test_keys_that_nothing_loads_are_refused_at_the_first_save",
    ),
    (
        "a module is read before its keys are refused",
        "if keys := self._unclaimed(live):",
        "if keys := []:",
        "test_restorable.py::test_keys_that_nothing_loads_touch_nothing_when_an_old_checkpoint_is_restored",
    ),
    (
        "a nested buffer is saved, which nothing loads",
        "if isinstance(value, torch.Tensor) and value.is_nested}",
        "if False}",
        "test_restorable.py::test_nested_buffers_are_refused",
    ),
    (
        "every save looks at all keys",
        "(found := list(state)) == skeleton.accepted_keys:",
        "(found := list(state)) is None:",
        "test_restorable.py::test_an_extra_state_that_changes_does_not_cost_a_look_at_the_keys",
    ),
    (
        "keys that a hook takes are refused",
        " and not _has_custom_loader(self.module, key)]",
        "]",
        "test_restorable.py::test_keys_that_something_takes_are_saved_and_restored",
    ),
    (
        "the model is read before the optimizer refuses",
        "if not problems and (why := self._refusal(saved)) is not None:",
        "if (why := None) is not None:",
        "test_restorable.py::test_the_state_of_another_optimizer_touches_nothing",
    ),
    (
        "moments of other parameters are given to a subclass",
        'return str(getattr(type(inner).step, "__module__", "")).startswith("torch.optim.")',
        'return type(optimizer).__module__.startswith("torch.optim.")',
        "test_restorable.py::test_moments_of_other_parameters_touch_nothing",
    ),
    (
        "a state that a hook makes readable is refused",
        " or _prepares_state(self.optimizer):\n",
        ":\n",
        "test_restorable.py::test_an_optimizer_with_load_hooks_is_not_tried",
    ),
    (
        "the model is read before the loader refuses",
        "        self._loader.check(saved)\n",
        "",
        "test_restorable.py::test_the_position_of_another_loader_touches_nothing",
    ),
    (
        "the model is read before the random numbers are refused",
        "        check_rng(saved)\n",
        "",
        "test_restorable.py::test_random_numbers_of_another_kind_touch_nothing",
    ),
)
_in(
    "lazyckpt/functional.py",
    (
        "load runs code unless it is told not to",
        'return not is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if asked is None else asked',
        "return False if asked is None else asked",
        (
            "test_functional.py::test_no_code_is_run "
            "test_functional.py::test_weights_only_refuses_by_name_and_says_what_to_do"
        ),
    ),
    (
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD is not heeded",
        'if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):',
        "if False:",
        "test_functional.py::test_weights_only_means_what_it_means_to_torch",
    ),
    (
        "the folder of a checkpoint is loaded unchecked",
        "        read_checkpoint(path)\n",
        "",
        "test_functional.py::test_a_checkpoint_folder",
    ),
    (
        "what a killed lazyckpt.save left stays",
        "        _sweep(target.parent)\n",
        "",
        "test_functional.py::test_what_a_killed_save_left_goes_with_the_next_and_what_is_being_saved_stays",
    ),
    (
        "a lone file is published before it is durable",
        ("            job.wait_settled()\n            job.raise_error()\n        except"),
        ("            job.raise_error()\n        except"),
        "test_faults.py::test_a_lone_file_fails test_functional.py",
    ),
    (
        "a lone file is published with errors",
        ("            job.raise_error()\n        except"),
        "        except",
        "test_faults.py::test_a_lone_file_that_cannot_be_written_is_not_published",
    ),
)
_in(
    "lazyckpt/reading/restore.py",
    (
        "a passing error of the machine counts as damage",
        (
            "        except ReadError as error:\n            raise _refused(error, archive) from error\n"
            "        except UnsupportedFormatError:\n"
        ),
        "        except UnsupportedFormatError:\n",
        "test_restore.py::test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged",
    ),
    (
        "retention is not told of what is damaged",
        "catalog.damaged.add(",
        "set().add(",
        "test_checkpointer.py::test_a_checkpoint_that_restore_found_damaged_does_not_count",
    ),
    (
        "what another process removed is passed over, and what it has committed since",
        "if scans > 1 and not os.path.exists(checkpoint.path):",
        "if False:",
        "test_restore.py::test_another_process_removes_what_is_about_to_be_restored",
    ),
    (
        "restore runs code",
        "weights_only=True, engine=engine",
        "weights_only=False, engine=engine",
        "test_restore.py::test_a_type_that_is_not_allowed_does_not_fall_back_either",
    ),
    (
        "what is not allowed is passed over",
        "        except UnsupportedFormatError:\n            raise  # not",
        "        except ZeroDivisionError:\n            raise  # not",
        "test_restore.py::test_a_type_that_is_not_allowed_does_not_fall_back_either",
    ),
    (
        "a part of a storage lands",
        "== slot.record.nbytes\n                for",
        "<= slot.record.nbytes\n                for",
        "test_restore.py",
    ),
    ("what is transposed lands", "                and landing.live.is_contiguous()\n", "", "test_restore.py"),
    ("what was transposed lands", "                and landing.saved.is_contiguous()\n", "", "test_restore.py"),
    (
        "what was conjugated lands",
        "                and landing.saved.is_conj() == landing.live.is_conj()\n",
        "",
        "test_restore.py",
    ),
    (
        "what was negated lands",
        "                and landing.saved.is_neg() == landing.live.is_neg()\n",
        "",
        "test_restore.py",
    ),
    (
        "what does not fit is restored in part",
        "    except RestoreError as error:\n        lines =",
        "    except RestoreError:\n        landings = []\n    except AssertionError as error:\n        lines =",
        "test_restore.py::test_a_changed_model_is_one_error_that_lists_all_and_touches_nothing",
    ),
    (
        "several land in one place",
        "claims[place] == 1",
        "True",
        "test_restore.py::test_a_parameter_that_is_tied_now_takes_the_last_of_its_values",
    ),
    (
        "what is seen elsewhere, too, lands",
        "len(group) == slot.references",
        "True",
        "test_restore.py::test_a_weight_that_somebody_else_has_saved_too_reaches_both",
    ),
)
_in(
    "lazyckpt/storage/retry.py",
    (
        "what cannot be read just now is not tried again",
        "for pause_s in _PAUSES_S:",
        "for pause_s in ():",
        "test_restore.py::test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged",
    ),
)
_in(
    "lazyckpt/storage/catalog.py",
    (
        "a checkpoint that cannot be read just now has no number",
        "    except ReadError as error:\n        what =",
        "    except () as error:\n        what =",
        "test_restore.py::test_a_save_is_numbered_behind_what_cannot_be_read_just_now",
    ),
    (
        "a file that nobody can ask for is missing",
        "except (FileNotFoundError, NotADirectoryError):",
        "except OSError:",
        "test_restore.py::test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged",
    ),
    (
        "retention removes what restore() passed over",
        "elif (c.step, c.sequence) in damaged:",
        "elif whole < keep_last and (c.step, c.sequence) in damaged:",
        "test_restore.py::test_what_is_not_readable_or_damaged_is_left_alone_by_retention",
    ),
    (
        "retention makes up for a line that is too short with the oldest",
        "for c in (*lineage, *others):",
        "for c in (*lineage, *reversed(others)):",
        "test_catalog.py::test_a_line_that_is_too_short_is_made_up_for_by_the_newest_others",
    ),
    (
        "retention does not make up for a line that is too short",
        "elif whole < keep_last:",
        "elif whole < keep_last and c in on_chain:",
        "test_checkpointer.py::test_a_run_that_goes_on_from_elsewhere_keeps_as_many_as_it_should",
    ),
    (
        "retention counts what is damaged",
        "in damaged:",
        "in ():",
        "test_catalog.py::test_what_is_damaged_does_not_count",
    ),
    (
        "nor is what it removed while the names were read",
        "if all(isinstance(error, ReadError) or os.path.lexists(error.path) for error in self.broken):",
        "if True:",
        "test_catalog.py::test_what_is_removed_while_it_is_read_is_not_there",
    ),
    (
        "lengths are not compared with the manifest",
        "if nbytes != entry.nbytes:",
        "if nbytes is None:",
        "test_catalog.py test_cli.py::test_verify_compares_lengths_with_the_manifest",
    ),
    ("a file may be a link", "return os.lstat(path)", "return os.stat(path)", "test_catalog.py"),
    ("a file may be a folder", " and stat.S_ISREG(status.st_mode) else None", " else None", "test_catalog.py"),
    ("a manifest may be a link", "if stat.S_ISLNK(status.st_mode):", "if False:", "test_catalog.py"),
    ("a manifest may have any length", "if reader.size > _MAX_MANIFEST_BYTES:", "if False:", "test_catalog.py"),
    (
        "a manifest may name files elsewhere",
        'or value in ("", ".", "..", commit.MANIFEST) or "/" in value or "\\0" in value:',
        ":",
        "test_catalog.py",
    ),
    (
        "a renamed folder is another checkpoint",
        " and int(named[1]) != checkpoint.step:",
        " and False:",
        "test_catalog.py",
    ),
    (
        "a manifest need not name the state",
        "if STATE not in names or",
        "if",
        "test_catalog.py",
    ),
    ("a manifest may name a file twice", " or len(set(names)) != len(names)", "", "test_catalog.py"),
    (
        "a manifest's checksum is not compared",
        'if data["crc32"] != checksum(data):',
        "if False:",
        "test_catalog.py::test_a_manifest_that_was_changed_is_found",
    ),
    (
        "numbers may be anything",
        "if type(value) is not int or not 0 <= value <= MAX_NUMBER:",
        "if False:",
        "test_catalog.py",
    ),
    ("a checkpoint may be a link", "if entry.is_symlink():", "if False:", "test_catalog.py"),
    (
        "a manifest of the future is read",
        'if type(data["format"]) is not int or data["format"] != FORMAT:',
        "if False:",
        "test_catalog.py",
    ),
    ("sums may be anything", 'or not re.fullmatch("[0-9a-f]{8}", value)', "", "test_catalog.py"),
    (
        "names may be half a character",
        "    value.encode()  # not half a character\n",
        "",
        _attacks("folders.manifest_names_half_a_character"),
    ),
    (
        "what is pinned goes",
        "elif c.pinned:",
        "elif False:",
        "test_cli_prune.py::test_what_is_pinned_stays_until_it_is_unpinned",
    ),
    (
        "a pin is gone after a power cut",
        "0o666))\n    commit.sync_path(checkpoint.parent)",
        "0o666))",
        "test_catalog.py::test_pins_are_durable",
    ),
    (
        "a pin is back after a power cut",
        "missing_ok=True)\n    commit.sync_path(checkpoint.parent)",
        "missing_ok=True)",
        "test_catalog.py::test_pins_are_durable",
    ),
    (
        "newest is the highest step",
        "return sorted(found, key=lambda c: c.sequence, reverse=True)",
        "return sorted(found, key=lambda c: c.step, reverse=True)",
        "test_checkpointer.py::test_rollback_the_newest_is_the_last_saved_not_the_highest",
    ),
)
_in(
    "lazyckpt/cli/verify.py",
    ("verify compares no record", "if r.crc32 is not None and r.crc32 != crc]", "if False]", VERIFY),
    ("verify compares no file", "if whole != entry.crc32:", "if False:", VERIFY),
)

_in(
    "lazyckpt/cli/prune.py",
    (
        "prune removes what was saved again meanwhile",
        "found == checkpoint.sequence and",
        "",
        "test_cli_prune.py::test_a_step_that_is_saved_again_or_pinned_meanwhile_stays",
    ),
    (
        "prune removes what was pinned meanwhile",
        " and not os.path.lexists(pin_of(checkpoint.path))",
        "",
        "test_cli_prune.py::test_a_step_that_is_saved_again_or_pinned_meanwhile_stays",
    ),
)

_in(
    "lazyckpt/tools/stream.py",
    (
        "what is converted appears before it is written",
        "            job.wait_settled()\n            job.raise_error()\n            written",
        "            written",
        "test_cli_convert.py",
    ),
    (
        "what is converted is not compared with what was read",
        "if wrong := [views.keys[source] for source, crc in crcs.items() if written[source] != crc]:",
        "if wrong := []:",
        "test_cli_convert.py::test_what_is_written_is_compared_with_what_was_read",
    ),
    (
        "a buffer is read into while a file waits for the next one",
        "enumerate(batch for batch in batches if batch.sources):",
        "enumerate(batches):",
        "test_cli_shards.py::test_archives_are_sharded_as_hugging_face_does_it",
    ),
)

_in(
    "lazyckpt/tools/contents.py",
    (
        "an index leads out of its folder",
        ' or "/" in file or',
        " or",
        "test_cli_shards.py::test_an_index_leads_to_nothing_outside_of_its_folder",
    ),
    (
        "an index leads to itself",
        "    contents = _read_file(file)\n    if not isinstance",
        "    contents = read(file)\n    if not isinstance",
        "test_cli_shards.py::test_an_index_leads_to_nothing_outside_of_its_folder",
    ),
    (
        "an index is not compared with its shards",
        "if wrong := names ^ contents.obj.keys():",
        "if wrong := ():",
        "test_cli_shards.py::test_a_shard_that_is_missing_or_of_another_model_is_damage",
    ),
)
_in(
    "lazyckpt/reading/tree.py",
    (
        "records of two files are one",
        "place = tensor.storage.file, record.name",
        "place = record.name",
        "test_cli_shards.py::test_shards_are_one_document",
    ),
)

# containers: a file has one meaning

_in(
    "lazyckpt/formats/torch_zip_reader.py",
    ("a zip may begin with anything", "if file.read(0, min(file.size, 4)) != LOCAL_MAGIC:", "if False:", ARCHIVES),
    ("may end with anything", "if magic != END_MAGIC:", "if False:", ARCHIVES),
    (
        "may have a comment, or several disks",
        "if disk or first_disk or here != count or comment:",
        "if False:",
        ARCHIVES,
    ),
    (
        "its locator may point anywhere",
        "if locator != LOCATOR_64.pack(LOCATOR_64_MAGIC, 0, directory_end, 1):",
        "if False:",
        ARCHIVES,
    ),
    (
        "its zip64 end may be damaged",
        "if magic != END_64_MAGIC or rest != END_64_REST or disk or first_disk or here != count:",
        "if False:",
        ARCHIVES,
    ),
    ("its ends may contradict each other", "if short not in (maximum, long):", "if False:", ARCHIVES),
    ("its directory may lie anywhere", "if offset + nbytes != directory_end:", "if False:", ARCHIVES),
    (
        "its directory may have any size",
        "if not 0 < count * CENTRAL_ENTRY.size <= nbytes <= _MAX_DIRECTORY_BYTES:",
        "if False:",
        ARCHIVES,
    ),
    ("its directory may be cut off", "if data > len(raw):", "if False:", ARCHIVES),
    (
        "entries of its directory may be damaged",
        "if magic != CENTRAL_MAGIC or comment_len or disk or position > len(raw):",
        "if False:",
        ARCHIVES,
    ),
    ("records may be compressed", "if method or flags & ~(FLAG_DESCRIPTOR | FLAG_UTF8):", "if False:", ARCHIVES),
    (
        "records may be links",
        "if attributes >> 28 not in (0, 8) or attributes & 0x10:",
        "if attributes & 0x10:",
        ARCHIVES,
    ),
    ("records may be folders", " or attributes & 0x10:", ":", _attacks("zips.folder_with_data")),
    ("records may have two sizes", "if packed != nbytes:", "if False:", ARCHIVES),
    ("something may follow the last entry", "if position != len(raw):", "if False:", ARCHIVES),
    ("extra fields may be cut off", "if position + 4 > len(extra):", "if False:", ARCHIVES),
    (
        "extra fields may be too long, or there twice",
        "if position > len(extra) or (kind == EXTRA_ZIP64 and values):",
        "if False:",
        ARCHIVES,
    ),
    ("a zip64 field may not fit", "if len(values) != 8 * fields.count(MAX_32):", "if False:", ARCHIVES),
    (
        "records may begin behind the front",
        "if starts[0] != 0 or spans[-2][1] > directory_offset:",
        "if False:",
        ARCHIVES,
    ),
    (
        "a local header may contradict the directory",
        "if (name_len, name) != (len(entry.name), entry.name) or flags != entry.flags or method:",
        "if False:",
        ARCHIVES,
    ),
    ("records may overlap", "if end > next_start:", "if False:", ARCHIVES),
    ("sizes may contradict the directory", "if told != known and not (deferred and told == 0):", "if False:", ARCHIVES),
    (
        "anything may lie between records",
        "if not deferred or gap > DESCRIPTOR_64.size or descriptor not in _descriptors(entry):",
        "if False:",
        ARCHIVES,
    ),
    ("a descriptor may be missing", "elif deferred and entry.nbytes:", "elif False:", ARCHIVES),
    (
        "names may lead elsewhere",
        'if "" in parts or "." in parts or ".." in parts or "\\\\" in name or "\\0" in name:',
        "if False:",
        ARCHIVES,
    ),
    ("records may lie outside of the folder", "if not slash or not name.startswith(prefix):", "if False:", ARCHIVES),
    (
        "names may be there twice",
        "if len({name.lower() for name in full_names}) != len(full_names):",
        "if False:",
        ARCHIVES,
    ),
    ("TorchScript passes", 'if "constants.pkl" in names:', "if False:", ARCHIVES),
    ("an archive needs no pickle", 'if "data.pkl" not in names:', "if False:", ARCHIVES),
)
_in(
    "lazyckpt/formats/safetensors.py",
    (
        "a header may have any length",
        "if nbytes > _MAX_HEADER_BYTES or data_offset > file.size:",
        "if False:",
        SAFETENSORS,
    ),
    ("a header may begin with anything", 'if not raw.startswith(b"{"):', "if False:", SAFETENSORS),
    (
        "metadata may be anything",
        ("if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):"),
        "if False:",
        SAFETENSORS,
    ),
    ("tensors may overlap, and leave gaps", "if info.record.offset != end:", "if False:", SAFETENSORS),
    ("something may follow the last tensor", "if end != file.size:", "if False:", SAFETENSORS),
    ("the header's checksum is not compared", "if not values or values[0] != rest:", "if False:", SAFETENSORS),
    (
        "a tensor may have other keys",
        'if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:',
        "if False:",
        SAFETENSORS,
    ),
    (
        "a tensor may be malformed",
        ("if not isinstance(kind, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:"),
        "if False:",
        SAFETENSORS,
    ),
    ("a dtype may be unknown", "if kind not in _TORCH_NAMES:", "if False:", SAFETENSORS),
    ("a packed dtype may be odd", "if not shape or shape[-1] % 2:", "if False:", SAFETENSORS),
    ("a shape may not fit its bytes", "if nbytes != end - begin:", "if False:", SAFETENSORS),
    (
        "True is a size",
        "type(value) is list and all(type(n) is int and",
        "type(value) is list and all(isinstance(n, int) and",
        SAFETENSORS,
    ),
)
_in(
    "lazyckpt/formats/base.py",
    (
        "opening a pipe waits for its writer",
        " | os.O_NONBLOCK)",
        ")",
        (
            "test_functional.py::test_a_folder_or_a_pipe_in_the_place_of_a_file "
            "test_catalog.py::test_a_manifest_that_is_no_file_does_not_hang"
        ),
    ),
    (
        "keys may be there twice",
        "if len(tree) != len(pairs):",
        "if False:",
        f"{SAFETENSORS} {_attacks('headers.duplicate_tensor', 'folders.manifest_key_twice')}",
    ),
    (
        "a shape may overflow",
        "if count > _MAX_SIZE:",
        "if False:",
        f"{SAFETENSORS} {_attacks('headers.overflowing_shape', 'headers.overflowing_empty_shape')}",
    ),
    (
        "a read beyond the end is tried",
        "if offset < 0 or offset + nbytes > self.size:",
        "if False:",
        "test_torch_zip.py::test_a_read_beyond_the_end_asks_for_no_memory",
    ),
)

# csrc: bytes

_in(
    "csrc/io_posix.cc",
    (
        "a file is written over what is there",
        "O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC",
        "O_WRONLY | O_CREAT | O_CLOEXEC",
        "test_engine.py::test_a_file_is_created_once_and_never_overwritten",
    ),
)
_in(
    "csrc/engine.cc",
    (
        "space is not reserved",
        "if (status.ok()) status = io_->Allocate(fd, size, path);",
        "",
        "test_faults.py::test_every_operation_of_a_save_fails test_faults.py::test_disk_full",
    ),
)
_in(
    "csrc/io_posix.cc",
    (
        "lack of space is ignored",
        'return Status(errno, "fallocate", path);',
        "return Status::Ok();",
        "test_faults.py::test_disk_full",
    ),
)
_in(
    "csrc/writer.cc",
    (
        "the ring is pinned without looking at what is to be written",
        "range_end = [&](size_t at) { return std::min(AlignUp(at + 1, kPrepareBytes), capacity); };",
        "range_end = [&](size_t) { return capacity; };",
        "test_cuda.py::test_a_checkpoint_is_written_while_the_ring_is_still_being_pinned",
    ),
    (
        "the next range of the ring waits for the next write",
        "      if (PrepareRing()) io_->Wake();",
        "      (void)PrepareRing();",
        "test_cuda.py::test_a_checkpoint_is_written_while_the_ring_is_still_being_pinned",
    ),
    (
        "a failed truncation is ignored",
        "    status = io_->Truncate(file->fd",
        "    (void)io_->Truncate(file->fd",
        EVERY_OPERATION,
    ),
    (
        "a file keeps its padding",
        ("status = io_->Truncate(file->fd, file->size, file->path);  // what padding or preallocation made too long"),
        "",
        "test_engine.py::test_any_program",
    ),
)
_in(
    "csrc/io_posix.cc",
    (
        "the thread pool does not sync",
        "n = fdatasync(r.fd);",
        "n = 0;",
        "test_engine.py::test_what_has_settled_is_on_the_disk",
    ),
)
_in(
    "csrc/io_uring.cc",
    (
        "io_uring does not sync",
        "io_uring_prep_fsync(sqe, request.fd, IORING_FSYNC_DATASYNC);",
        "io_uring_prep_nop(sqe);",
        "test_engine.py::test_what_has_settled_is_on_the_disk",
    ),
)
_in(
    "csrc/writer.cc",
    ("durable without a sync", "    syncs_.push_back(&file);", "    file.synced = true;", EVERY_OPERATION),
    (
        "synced before all is laid out",
        "if (!job.sealed || !job.error.ok()) return;",
        "if (!job.error.ok()) return;",
        "test_engine.py",
    ),
    (
        "synced before all is written",
        "if (file.chunks_left > 0 || file.fd < 0 || file.sync_begun) continue;",
        "if (file.fd < 0 || file.sync_begun) continue;",
        "test_engine.py::test_any_program test_faults.py::test_every_operation_of_a_save_fails",
    ),
    ("a failed sync is ignored", "if (result.result < 0) {", "if (false) {", EVERY_OPERATION),
    (
        "a failed write is ignored",
        "const bool again = result > 0 || IsTransient(result);",
        (
            "const bool again = true;\n"
            "    if (result <= 0 && !IsTransient(result)) chunk->written = chunk->size;\n"
            "    if (chunk->written == chunk->size) return OnChunkResult(chunk, 0);"
        ),
        EVERY_OPERATION,
    ),
    (
        "a failed write is tried again",
        "const bool again = result > 0 || IsTransient(result);",
        "const bool again = true;",
        EVERY_OPERATION,
    ),
    ("a short write is whole", "if (chunk->written < chunk->size) {", "if (false) {", PASSING),
    (
        "a short write goes on where it stopped",
        "if (file.direct) chunk->written -= chunk->written % kBlockBytes;",
        "",
        PASSING,
    ),
    (
        "a write that moves nothing is tried for ever",
        "(chunk->written == before && ++chunk->retries > kMaxRetries)",
        "false",
        "test_faults.py::test_a_write_that_never_moves_anything_is_given_up",
    ),
)
_in(
    "csrc/layout.cc",
    (
        "a checkpoint with holes is sealed",
        "if (!IsComplete(job)) {",
        "if (false) {",
        "test_engine.py::test_invalid_programs_are_refused",
    ),
)
_in(
    "csrc/engine.cc",
    (
        "captured before it is copied",
        "return HelpUntil([&job, owners] { return job.captured(owners); }, deadline);",
        "return HelpUntil([] { return true; }, deadline);",
        WAITS,
    ),
    (
        "released before it is copied",
        "const auto released = [&job] { return job.sources_released(); };",
        "const auto released = [] { return true; };",
        "test_gate.py::test_after_wait_captured_of_a_handle_everything_may_change test_engine.py test_cuda.py",
    ),
    (
        "settled before it is written",
        "const auto settled = [&job] { return job.settled(); };",
        "const auto settled = [] { return true; };",
        f"test_engine.py::test_any_program {EVERY_OPERATION}",
    ),
)
_in(
    "csrc/capture.cc",
    (
        "a step waits on the host until all but four chunks have landed",
        "helping ? options_.copies_ahead : options_.copies_in_flight",
        "options_.copies_in_flight",
        "test_cuda.py::test_a_thread_that_waits_enqueues_more",
    ),
    (
        "a thread that waits enqueues without bound",
        "helping ? options_.copies_ahead : options_.copies_in_flight",
        "helping ? ~size_t{0} : options_.copies_in_flight",
        "test_cuda.py::test_a_thread_that_waits_enqueues_more",
    ),
    (
        "the copy engine never runs dry",
        "    if (!helping && l.burst >= options_.copies_in_flight) return nullptr;\n",
        "",
        "test_cuda.py::test_the_copy_engine_runs_dry_now_and_then",
    ),
    (
        "who waits for copies waits for the copy engine to run dry, too",
        "    if (!helping && l.burst >=",
        "    if (l.burst >=",
        "test_cuda.py::test_the_copy_engine_runs_dry_now_and_then",
    ),
    (
        "lack of memory on a copy thread ends the process",
        "    FailNext();\n    return true;\n",
        "    throw;\n",
        "memory/test_memory.py::test_no_memory_for_the_threads_of_the_engine",
    ),
    (
        "all copy threads work at once",
        "copying_ >= modest_",
        "false",
        "test_engine.py::test_half_of_the_cores_are_trainings_until_the_ring_is_full",
    ),
    (
        "who waits for the ring does not wake the writer",
        "    if (helping) io_->Wake();",
        "",
        "test_engine.py::test_what_does_not_fit_into_the_ring_makes_room_before_the_copy_threads_may",
    ),
    (
        "a checksum does not wait for its source",
        ("    if (source.parts_left == 0) {\n      WriteCrc32"),
        ("    if (true) {\n      WriteCrc32"),
        "test_engine.py::test_checksum_waits_for_a_source_that_another_thread_copies",
    ),
    (
        "a source's checksum is that of its first part",
        "for (size_t i = 1; i < source.parts.size(); ++i)",
        "for (size_t i = 1; i < 1; ++i)",
        "test_engine.py::test_ring_of_one_chunk test_engine.py::test_any_program",
    ),
)
_in(
    "csrc/checksum.cc",
    (
        "a checksum is of the source, which may change before it is copied",
        "return Crc32(crc, copy.data(), kBlockBytes);",
        "return Crc32(crc, from, kBlockBytes);",
        "test_engine.py::test_a_checksum_is_that_of_the_copy_whoever_writes_to_the_source_meanwhile",
    ),
)
_in(
    "csrc/engine.cc",
    (
        "a copy is released while it is made",
        "job.error.ok() ? job.eager_left == 0 : job.copying == 0",
        "job.error.ok() ? job.eager_left <= 1 : job.copying == 0",
        (
            "test_engine.py::test_failed_by_the_caller "
            "test_engine.py::test_a_dropped_job_releases_everything test_consistency.py"
        ),
    ),
)
_in(
    "csrc/ring.cc",
    (
        "a ring that has wrapped takes what is in use",
        "} else if (wrapped && offset + size > oldest) {",
        "} else if (false) {",
        (
            "test_ring.py::test_wraps_while_the_oldest_region_is_live "
            "test_ring.py::test_first_in_first_out_never_gets_stuck test_ring.py"
        ),
    ),
    (
        "a ring wraps over what is in use",
        "if (size > oldest) return nullptr;",
        "",
        (
            "test_ring.py::test_wraps_while_the_oldest_region_is_live "
            "test_ring.py::test_first_in_first_out_never_gets_stuck test_ring.py"
        ),
    ),
    (
        "copies cross slices",
        "return offset + size <= slice_end ? offset : slice_end;",
        "return offset + (slice_end - slice_end) + (size - size);",
        "test_ring.py",
    ),
    (
        "children inherit the ring",
        "if (madvise(base_, mapped_, MADV_DONTFORK) != 0)",
        "if (false)",
        "test_engine.py::test_forks_do_not_inherit_the_ring",
    ),
)
_in(
    "csrc/reader.cc",
    (
        "a failed read is ignored",
        (
            "if (result < 0 && result != -EINTR && result != -EAGAIN) "
            'Fail(Status(static_cast<int>(-result), "read", path_));'
        ),
        "if (result < 0 && result != -EINTR && result != -EAGAIN) flight->done = unit.end;",
        READS,
    ),
    (
        "a range may end behind the file",
        "if (r.offset > file_size_ || r.size > file_size_ - r.offset)",
        "if (false)",
        "test_reader.py::test_beyond_the_end fuzz/test_fuzz.py::test_the_engine_reads_inside_the_file_or_not_at_all",
    ),
    (
        "what was read lands before it is said where",
        "  void Deliver(const Flight& flight) {\n    if (!AwaitPlaces()) return;",
        "  void Deliver(const Flight& flight) {",
        "test_reader.py::test_nothing_lands_before_it_is_said_where test_reader.py",
    ),
    (
        "a read that moves nothing is tried for ever",
        "if (result == 0 || (flight->done == before && ++flight->retries > kMaxRetries))",
        "if (result == 0)",
        "test_reader.py::test_a_read_that_never_moves_anything_is_given_up",
    ),
    (
        "a short read is whole",
        "if (!failed_ && flight->done < std::min(unit.end, file_size_) - unit.begin) {",
        "if (false) {",
        "test_reader.py::test_passing_troubles_are_overcome",
    ),
    (
        "a file that shrinks in the page cache is whole",
        "if (n <= 0) return Fail(",
        "if (n < 0) return Fail(",
        "test_reader.py",
    ),
)
_in(
    "csrc/py_job.cc",
    (
        "files are told of before they are durable",
        "if (!job_->durable()) throw",
        "if (false) throw",
        "test_engine.py",
    ),
    (
        "what a checkpoint copies is freed when nobody holds it",
        "    e.WaitReleased(*job_, Clock::time_point::max());\n",
        "",
        "test_cuda.py::test_a_checkpoint_that_nobody_holds_lets_go_after_its_copies",
    ),
)
_in(
    "csrc/py_engine.cc",
    (
        "a child uses the engine of its parent",
        "if (!alive()) throw std::runtime_error",
        "if (false) throw std::runtime_error",
        "test_engine.py::test_a_forked_child_has_an_inert_engine",
    ),
)

# devices

_in(
    "csrc/device_cuda.cc",
    (
        "copies do not wait for training",
        ("if (status.ok()) status = Call(driver_->cuStreamWaitEvent, lane, mark_, CU_EVENT_WAIT_DEFAULT);"),
        "(void)lane;",
        DEVICES,
    ),
    (
        "training does not wait for copies",
        ("if (status.ok()) status = Call(driver_->cuStreamWaitEvent, Stream(stream), mark_, CU_EVENT_WAIT_DEFAULT);"),
        "(void)stream;",
        DEVICES,
    ),
)
_in(
    "csrc/device_cuda.cc",
    (
        "copies wait for what another thread has marked",
        (
            "      std::lock_guard lock(marking_);\n"
            "      Status status = Call(driver_->cuEventRecord, mark_, Stream(stream));"
        ),
        "      Status status = Call(driver_->cuEventRecord, mark_, Stream(stream));",
        "test_cuda.py::test_many_threads_and_each_waits_for_its_own",
    ),
    (
        "training waits for what another thread has marked",
        (
            "      std::lock_guard lock(marking_);\n"
            "      Status status = Call(driver_->cuEventRecord, mark_, StreamOf(lane));"
        ),
        "      Status status = Call(driver_->cuEventRecord, mark_, StreamOf(lane));",
        "test_cuda.py::test_many_threads_and_each_waits_for_its_own",
    ),
    (
        "copies are under way when the wait for them failed",
        "    if (!status.ok()) (void)Inside(wait);  // whatever",
        "    // whatever",
        "test_cuda.py::test_every_call_that_fails_fails_its_checkpoint_alone",
    ),
    (
        "a context is left behind",
        "    if (!status.ok()) (void)Call(driver_->cuCtxSetCurrent, before);\n",
        "",
        "test_cuda.py::test_the_contexts_of_the_caller_stay",
    ),
    (
        "a batch is as long as the chunk has pieces",
        "std::min(copies.size(), kBatchMost)",
        "std::min<size_t>(copies.size(), 4 * kBatchMost)",
        "test_cuda.py::test_many_small_copies_are_one_call",
    ),
    (
        "a batch that is refused fails the checkpoint",
        "      if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED) {",
        "      if (false) {",
        "test_cuda.py::test_a_driver_that_refuses_a_batch_is_given_no_other",
    ),
    (
        "a driver that refuses batches is asked again",
        "        batches_ = false;  // this driver",
        "        // this driver",
        "test_cuda.py::test_a_driver_that_refuses_a_batch_is_given_no_other",
    ),
    (
        "nobody asks the device whether it takes registered memory by its address",
        ".ok() && by_host_address != 0;",
        ".ok();",
        "test_cuda.py::test_without_batches_they_are_copied_one_by_one",
    ),
    (
        "the default stream is not captured, it says",
        "*capturing = result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || found",
        "*capturing = found",
        "test_cuda.py::test_the_default_stream_may_not_be_asked_during_a_capture",
    ),
)
_in(
    "csrc/engine.cc",
    (
        "a source may lie where no stream is told of",
        "if (s.device < 0 || (static_cast<size_t>(s.device) < kMaxDevices && (ready >> s.device & 1) != 0)) continue;",
        "continue;",
        "test_cuda.py::test_a_device_that_is_not_attached_is_refused",
    ),
    (
        "copies begin although they could not be put behind training",
        "  *status = CopyAfter(job->streams);\n  if (!status->ok()) return nullptr;",
        "  (void)CopyAfter(job->streams);",
        DEVICES,
    ),
    (
        "training goes on although it could not be put behind copies",
        "  if (!status.ok()) Fail(job, std::move(status));\n}\n\nbool Engine::WaitCaptured",
        "}\n\nbool Engine::WaitCaptured",
        DEVICES,
    ),
    (
        "it goes on while the copies of a failed checkpoint are under way",
        (
            "for (const Lane lane : {Lane::kEager, Lane::kLazy}) RunAfterCopies(job, lane, s);\n"
            "  return HelpUntil([&job] { return job.captured(0); }, deadline);"
        ),
        "for (const Lane lane : {Lane::kEager, Lane::kLazy}) RunAfterCopies(job, lane, s);\n  return true;",
        DEVICES,
    ),
    (
        "so does save",
        ("RunAfterCopies(job, Lane::kEager, s);\n  return HelpUntil([&job] { return job.captured(0); }, deadline);"),
        "RunAfterCopies(job, Lane::kEager, s);\n  return true;",
        DEVICES,
    ),
)
_in(
    "csrc/capture.cc",
    (
        "a copy that could not be enqueued is written",
        "  if (!status.ok()) FailLocked(job, std::move(status));\n",
        "",
        "test_cuda.py::test_every_call_that_fails_fails_its_checkpoint_alone",
    ),
    (
        "a copy that failed is written",
        "  if (!status.ok()) FailLocked(*keep, std::move(status));\n",
        "",
        "test_cuda.py::test_every_call_that_fails_fails_its_checkpoint_alone "
        "test_cuda.py::test_a_lost_device_fails_checkpoints_not_the_process",
    ),
    (
        "restore returns before its copies are complete",
        "return status.ok() ? target.Finish(Lane::kRestore, ticket) : status;",
        "return status;",
        DEVICES,
    ),
)
_in(
    "csrc/py_reader.cc",
    (
        "restore writes to what training still reads",
        "status = e.CopyAfter(current);",
        "status = Status::Ok();",
        DEVICES,
    ),
    (
        "restore writes where no stream is told of",
        "if (device >= 0 && std::none_of(",
        "if (false && std::none_of(",
        "test_cuda.py test_cuda_training.py",
    ),
)
_in(
    "csrc/engine.cc",
    (
        "nor for eager ones",
        "if ((devices >> s.device & 1) != 0) RunAfterCopies(job, Lane::kEager, s);",
        "(void)s;",
        DEVICES,
    ),
    (
        "the step waits for eager copies alone",
        "for (const Lane lane : {Lane::kEager, Lane::kLazy}) RunAfterCopies(job, lane, s);",
        "RunAfterCopies(job, Lane::kEager, s);",
        DEVICES,
    ),
    (
        "host memory is left to a wait of the stream",
        "if (!HelpUntil([&job, owners] { return job.enqueued(owners); }, deadline)) return false;",
        (
            "const auto on_device = [&] {\n"
            "    for (const auto& c : job.chunks)\n"
            "      if (c->devices != 0 && (c->owners & owners) && c->state <= Chunk::State::kCopying) return false;\n"
            "    return true;\n"
            "  };\n"
            "  if (!HelpUntil(on_device, deadline)) return false;"
        ),
        "test_cuda_training.py::test_host_memory_of_an_optimizer_is_copied_before_its_step",
    ),
    (
        "the step does not wait for what is not enqueued",
        "if (!HelpUntil([&job, owners] { return job.enqueued(owners); }, deadline)) return false;",
        "",
        DEVICES,
    ),
    (
        "save does not wait for what is not enqueued",
        "return job.error.ok() ? job.eager_left == 0 : job.copying == 0;",
        "return true;",
        DEVICES,
    ),
)
_in(
    "csrc/device_cuda.cc",
    (
        "a copy is complete before it is",
        "const auto wait = [&] { return Call(driver_->cuEventSynchronize, event); };",
        "const auto wait = [&] { return Status::Ok(); };",
        DEVICES,
    ),
    (
        "the done-event stands before the copies",
        "if (done.ok()) done = Enqueue(copies, lane, pinned);",
        (
            "if (done.ok()) done = Call(driver_->cuEventRecord, event, StreamOf(lane));\n"
            "if (done.ok()) return Enqueue(copies, lane, pinned);"
        ),
        DEVICES,
    ),
    (
        "batches are read in any order",
        "attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;",
        "attributes.srcAccessOrder = static_cast<CUmemcpySrcAccessOrder>(3);",
        DEVICES,
    ),
)
_in(
    "csrc/capture.cc",
    ("copies cross what is pinned", "if (chunk->devices != 0) cuts = CutsIn(", "if (false) cuts = CutsIn(", DEVICES),
)
_in(
    "csrc/device_cuda.cc",
    (
        "copies go on when their checkpoint is over",
        "(void)Finish(lane, event);",
        "GiveBack(event);",
        DEVICES,
    ),
)
_in(
    "csrc/engine.cc",
    ("a captured stream is told to wait", "if (capturing) return WaitUntil(captured, deadline);", "", DEVICES),
)
_in(
    "csrc/device_cuda.cc",
    (
        "captures of other threads are in the way",
        "CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;",
        "CUstreamCaptureMode mode{};",
        DEVICES,
    ),
)
_in(
    "csrc/engine.cc",
    (
        "the ring is unpinned under copies",
        "    if (gpu != nullptr) StopLanes(*gpu);",
        (
            "    if (gpu != nullptr) {\n"
            "      for (const auto& pin : std::exchange(pins_, {})) pinner_->Unpin(pin);\n"
            "      StopLanes(*gpu);\n"
            "    }"
        ),
        "test_sanitizers.py",
    ),
)
_in(
    "csrc/capture.cc",
    (
        "the small buffer is filled again before it is emptied",
        "const std::byte* const bounce = chunk->bounce;",
        (
            "const std::byte* const bounce = chunk->bounce;\n"
            "if (bounce != nullptr) idle_bounces_.push_back(std::exchange(chunk->bounce, nullptr));\n"
            "changed_.notify_all();"
        ),
        DEVICES,
    ),
    (
        "the small buffer is filled again before it is full",
        "if (chunk->eager) --job.eager_left;",
        ("if (chunk->eager) --job.eager_left;\nif (chunk->bounce) idle_bounces_.push_back(chunk->bounce);"),
        DEVICES,
    ),
    (
        "restore fills the small buffer again before it is copied",
        "std::memcpy(bounce + used, c.host + done, n);",
        (
            "std::memcpy(bounce + used, c.host + done, n);\n"
            "if (used == 0) Locked([&] { idle_bounces_.push_back(bounce); });"
        ),
        DEVICES,
    ),
)
_in(
    "csrc/reader.cc",
    (
        "what belongs on the host passes over what belongs on devices",
        "if (on_device && !failed_) Upload(unit, buffer);",
        "if (!on_device && !failed_) Upload(unit, buffer);",
        UPLOADS,
    ),
)
_in(
    "lazyckpt/capture/snapshot.py",
    (
        "any optimizer is trusted to the stream",
        "self._wait(owners, on_device=is_of_torch(owner))",
        "self._wait(owners, on_device=True)",
        DEVICES,
    ),
)
_in(
    "lazyckpt/capture/gate.py",
    ("replays do not wait", "with gate.step(*self._steps):", "with contextlib.nullcontext():", DEVICES),
)
_in(
    "lazyckpt/capture/ownership.py",
    ("replayed steps are lazy", " and gate.replayed.get(owner, True)", "", DEVICES),
)

_in(
    "lazyckpt/capture/warmup.py",
    (
        "a process that only restores takes memory",
        "            gate.warmups.add(self)\n",
        "            gate.warmups.add(self)\n            self.after_step(known)\n",
        "test_warmup.py::test_who_only_restores_takes_no_memory",
    ),
    (
        "a device is attached inside a capture",
        " or devices.capturing()",
        "",
        "test_warmup.py::test_not_while_a_graph_is_captured",
    ),
    (
        "an optimizer keeps a Saver alive",
        "self._prepare = weakref.WeakMethod(prepare)",
        "self._prepare = lambda: prepare",
        "test_warmup.py::test_an_optimizer_may_be_copied_pickled_and_outlive_its_saver",
    ),
)
_in(
    "lazyckpt/saver.py",
    (
        "a child's step prepares the buffer of its parent",
        "        if self._closed or os.getpid() != self._pid:\n            return\n",
        "",
        "test_warmup.py::test_a_forked_child_may_step",
    ),
    (
        "a device that cannot be used fails a step",
        "with contextlib.suppress(OSError):  # first the devices: the ring goes next to them",
        "with contextlib.nullcontext():",
        "test_warmup.py::test_a_device_that_cannot_be_attached_fails_the_save_and_no_step",
    ),
)

# The witnesses: pages, and versions at a point of program order

V, PAGES, LEARNT = "test_verdict.py::", "test_page_witness.py::", "test_torn.py::"
ONE_CALL = V + "test_nothing_is_published_while_the_thread_is_inside_one_long_call"
INSIDE = V + "test_nothing_is_published_inside_an_operation"
TOLD = V + "test_a_thread_that_the_other_one_waits_for_is_told"
ANY_WRITE = PAGES + "test_a_write_to_any_watched_page_fails_the_checkpoint"
TWO = PAGES + "test_two_snapshots_of_the_same_pages_keep_each_others_evidence"

_in(
    "lazyckpt/capture/snapshot.py",
    (
        "the background gives the verdict at once",
        "        if not self.verdict.is_thread_alive():\n",
        "        if True:\n",
        ONE_CALL,
    ),
    (
        "a thread that ended owes its verdict for ever",
        "        if not self.verdict.is_thread_alive():\n",
        "        if False:\n",
        V + "test_a_thread_that_has_ended_owes_nothing",
    ),
    (
        "a thread that waits is not taken to wait",
        "        gate.if_standing(self.verdict.thread.ident, self.verify)\n",
        "",
        V + "test_the_thread_that_owes_it_may_wait_in_every_way[wait_by_result-another]",
    ),
    (
        "the main thread is not asked",
        "        if versions is not None:\n            self.verify(versions=versions)\n",
        "",
        V + "test_audit_with_a_page_witness_is_published_without_a_call_of_ours",
    ),
    (
        "another thread speaks for the one that saved",
        "        if not self.verdict.is_owed_by_another():\n            self.verify()",
        "        self.verify()",
        V + "test_wait_captured_on_another_thread_does_not_speak_for_this_one",
    ),
    (
        "who waits for captures is not asked for a verdict",
        "            if owners == ALL_OWNERS:\n                self.verify_soon()\n",
        "            if owners == ALL_OWNERS:\n                pass\n",
        V + "test_wait_captured_on_another_thread_asks_this_one",
    ),
    (
        "a process waits for ever for a daemon",
        "if time.monotonic() > patient_until and self.verdict.owed:",
        "if False:",
        V + "test_a_process_does_not_wait_for_ever_for_a_daemon",
    ),
    (
        "written pages are not asked for",
        "        if written and self.torn is None:\n",
        "        if False:\n",
        LEARNT + "test_the_error_names_the_tensors_and_the_cure",
    ),
    (
        "a torn storage teaches nothing",
        "        self._torn_storages.add(self._storages[source]",
        "        tuple(self._storages[source]",
        LEARNT + "test_the_next_save_copies_all_and_later_ones_what_was_torn",
    ),
    (
        "shared memory is lazy",
        'bits and d.type == "cpu" and s.is_shared()',
        "False",
        "test_snapshot.py",
    ),
)
_in(
    "lazyckpt/capture/verdict.py",
    (
        "the main thread gives no verdict between two bytecodes",
        "self._reading = _engine.VersionReading(tensors) if owed and self.thread is threading.main_thread() else None",
        "self._reading: _engine.VersionReading | None = None",
        ONE_CALL,
    ),
    (
        "a sleeping event loop is not woken",
        "self._loop.call_soon_threadsafe(_nothing)",
        "pass",
        V + "test_it_is_published_while_an_event_loop_sleeps",
    ),
    (
        "a thread that Python did not start lives for ever",
        "        if not isinstance(self.thread, threading._DummyThread):\n",
        "        if True:\n",
        V + "test_a_thread_that_python_did_not_start_has_ended",
    ),
    (
        "steps of others wait for the thread that waits for them",
        "while not durable.done() and durable._obstacle() is None:",
        "while not durable.done():",
        V + "test_steps_of_another_thread_do_not_wait_for_it",
    ),
)
_in(
    "lazyckpt/capture/gate.py",
    (
        "a handler of a signal is taken to wait",
        "if any(_only_waits(stack, call) for call in mine):",
        "if mine:",
        V + "test_a_handler_of_a_signal_that_runs_during_a_wait_is_no_wait",
    ),
    (
        "after Ctrl-C a thread is taken to wait for ever",
        "            if any(_only_waits(stack, call) for call in mine):\n",
        "            if mine:\n",
        V + "test_ctrl_c_anywhere_in_a_wait_leaves_no_thread_standing",
    ),
    (
        "save() gives no verdicts",
        "            pending.give_verdict()\n",
        "            pass\n",
        V + "test_another_thread_gives_it_at_its_next_call",
    ),
)
_in(
    "lazyckpt/pipeline/handle.py",
    (
        "two threads wait for each other for ever",
        "raise obstacle._impatience()",
        "pass",
        TOLD,
    ),
    (
        "the save before is no obstacle",
        "            handle = handle._previous\n",
        "            return None\n",
        V + "test_result_of_a_later_save_is_told_of_the_one_before",
    ),
    (
        "concurrent.futures.wait() does not stand",
        "        waiter.event = _StandingEvent()\n",
        "",
        V + "test_the_thread_that_owes_it_may_wait_in_every_way[wait_by_futures-another]",
    ),
    (
        "result() takes twice its timeout",
        "return super().result(0)",
        "return super().result(timeout)",
        V + "test_timeouts_are_kept",
    ),
)
_in(
    "lazyckpt/pipeline/background.py",
    (
        "drain() does not say what it waits for",
        "wait_for(self._tasks, saves=self._in_flight)",
        "wait_for(self._tasks)",
        TOLD,
    ),
    (
        "a torn snapshot stops the next save",
        "if before_save and isinstance(error, TornSnapshotError):",
        "if False:",
        LEARNT + "test_it_is_a_warning_at_the_next_save",
    ),
    (
        "any failure is a warning at the next save",
        "if before_save and isinstance(error, TornSnapshotError):",
        "if before_save:",
        LEARNT + "test_a_failure_of_another_kind_still_stops_the_next_save",
    ),
)
_in(
    "lazyckpt/capture/torn.py",
    (
        "the save after a torn one is as lazy as that",
        "self._copy_all = True",
        "self._copy_all = False",
        LEARNT + "test_the_save_after_a_torn_one_commits_whoever_else_writes",
    ),
    (
        "torn storages are forgotten",
        "        _torn.update((storage._cdata",
        "        list((storage._cdata",
        LEARNT + "test_the_next_save_copies_all_and_later_ones_what_was_torn",
    ),
    (
        "the number of torn snapshots has no limit",
        "if copy_all or self._snapshots >= _MAX_TORN_SNAPSHOTS:",
        "if copy_all:",
        LEARNT + "test_after_three_torn_snapshots_nothing_is_lazy",
    ),
)
_in(
    "csrc/py_versions.cc",
    (
        "versions are read inside a dispatch mode",
        " || ask.dispatch_modes().cast<int64_t>() != 0",
        "",
        INSIDE + "[in_a_dispatch_mode]",
    ),
    (
        "versions are read in backward",
        "ask.graph_task().cast<int64_t>() != -1 || ",
        "",
        INSIDE + "[in_backward]",
    ),
    (
        "versions are read inside a custom function",
        "if (code.is(ask.apply)) return true;",
        "",
        INSIDE + "[in_a_custom_forward]",
    ),
    (
        "function modes run between two bytecodes of somebody",
        'disabled.attr("__enter__")();',
        "",
        V + "test_modes_of_functions_do_not_see_it",
    ),
    (
        "a full queue of pending calls is not tried again",
        "is_pending = Py_AddPendingCall(&AtPointOfProgramOrder, nullptr) == 0;",
        "is_pending = Py_AddPendingCall(&AtPointOfProgramOrder, nullptr) <= 0;",
        V + "test_the_queue_of_pending_calls_may_be_full",
    ),
    (
        "to have no versions to read looks like no answer",
        "  if (!reading->requested && !reading->read) {",
        "  if (!reading->requested && !reading->read && !reading->tensors().empty()) {",
        V + "test_audit_with_a_page_witness_is_published_without_a_call_of_ours",
    ),
)
_in(
    "csrc/page_witness.cc",
    (
        "written pages are not looked for",
        "piece.written = w.saved.empty() || !w.saved[(page - w.pages.begin) / kPageBytes];",
        "(void)w;",
        ANY_WRITE,
    ),
    (
        "memory that is not registered any more counts as clean",
        "w.written = w.written || piece.written || error != 0;",
        "w.written = w.written || piece.written;",
        PAGES + "test_memory_that_is_replaced_while_it_waits_fails_the_checkpoint",
    ),
    (
        "pages of a file are watched as if nobody else could change them",
        "of_file = of_file || (categories & kPageIsFile) != 0 ||",
        "of_file = of_file ||",
        PAGES + "test_what_the_file_below_a_mapping_may_change_is_copied_at_once",
    ),
    (
        "pages that the file has not given yet are watched",
        "(kind == Kind::kFile && !has_memory)",
        "false",
        PAGES + "test_what_the_file_below_a_mapping_may_change_is_copied_at_once",
    ),
    (
        "a page that went back to its file counts as clean",
        "call.category_anyof_mask = kPageIsWritten | kPageIsFile;",
        "call.category_anyof_mask = kPageIsWritten;",
        PAGES + "test_a_page_that_is_given_back_to_the_file_fails_the_checkpoint",
    ),
    (
        "what the kernel leaves unprotected counts as protected",
        "if (call.walk_end <= call.start) return ENOTSUP;",
        "if (call.walk_end <= call.start) break;",
        PAGES + "test_pages_of_hugetlbfs_are_copied_at_once",
    ),
    (
        "pages that another snapshot needs are opened",
        "  if (!awaited && WriteProtect(around, false) != 0 && pieces.size() > 1)",
        "  if (WriteProtect(around, false) != 0 && pieces.size() > 1)",
        TWO,
    ),
    (
        "what the first of two snapshots lost is forgotten",
        "theirs.written = !other->IsDone(theirs, page);",
        "(void)other->IsDone(theirs, page);",
        PAGES + "test_what_was_written_before_a_second_snapshot_tears_the_first_alone",
    ),
    (
        "pages that another snapshot watches in part are watched",
        "if (theirs.pages != ours->pages || !theirs.is_protected) return false;",
        "",
        PAGES + "test_a_snapshot_whose_pages_another_watches_in_part_is_copied_at_once",
    ),
    (
        "new memory is not registered",
        "if (!Register(pages, *mappings)) return false;",
        "return false;",
        ANY_WRITE,
    ),
    (
        "memory mapped anew counts as registered",
        "if (error != ENOENT) return error == 0;",
        "if (known) return true;",
        PAGES + "test_memory_that_was_unmapped_and_mapped_again_is_watched_anew",
    ),
    (
        "each storage is registered by itself",
        "    call.range = {at->pages.begin, at->pages.bytes()};\n",
        "const PageRange own = Common(at->pages, pages);\ncall.range = {own.begin, own.bytes()};\n",
        PAGES + "test_it_registers_whole_mappings",
    ),
    (
        "a failed checkpoint leaves its pages protected",
        "    if (!IsAwaited(window, w.pages)) (void)WriteProtect(w.pages, false);\n",
        "",
        PAGES + "test_a_failed_checkpoint_leaves_no_page_protected",
    ),
    (
        "a gap that is gone tears its neighbours",
        "  if (error != 0 && pieces.size() > 1) return false;\n",
        "",
        PAGES + "test_what_lies_between_neighbours_may_be_unmapped",
    ),
    (
        "what another snapshot watches is a bridge",
        "window->watched_[window->by_address_[at]].pages.begin < gap.end;",
        "window->watched_[window->by_address_[at]].pages.begin < gap.begin;",
        PAGES + "test_what_another_snapshot_watches_between_two_neighbours_is_left_to_it",
    ),
    (
        "who writes to a neighbour tears all of them",
        "Common(run, PageRange::Inside(piece.from.data(), piece.from.size()));",
        "PageRange::Inside(piece.from.data(), piece.from.size());",
        PAGES + "test_each_of_many_neighbours_is_watched_by_itself",
    ),
    (
        "a forked child asks about the memory of its parent",
        "if (of.maker != getpid()) {",
        "if (of.maker == 0) {",
        PAGES + "test_a_forked_child_watches_its_own_memory",
    ),
)
_in(
    "csrc/page_witness.cc",
    (
        "what else was written is not looked for when a checkpoint is torn",
        "if (w.is_protected && w.done.empty() && w.saved.empty())",
        "if (false)",
        PAGES + "test_all_that_was_written_is_named",
    ),
)
COPIES = "test_copy_on_write.py::"
_in(
    "csrc/page_witness.cc",
    (
        "what was copied aside is not put in place",
        "      piece.patched = true;\n",
        "",
        COPIES + "test_no_writer_tears_or_fails_the_checkpoint",
    ),
    (
        "a page is copied aside again after it was written",
        "if (w.saved[number] || window->IsDone(w, p)) continue;",
        "if (window->IsDone(w, p)) continue;",
        COPIES + "test_two_snapshots_of_the_same_pages_get_each_its_own",
    ),
    (
        "only the first of two snapshots gets the page aside",
        "        w.saved[number] = true;\n      }\n",
        "        w.saved[number] = true;\n      }\n      break;\n",
        COPIES + "test_two_snapshots_of_the_same_pages_get_each_its_own",
    ),
    (
        "memory that was thrown away is taken for unwritten, where pages are copied on write",
        "piece.written = w.saved.empty() || !w.saved[(page - w.pages.begin) / kPageBytes];",
        "piece.written = w.saved.empty();",
        COPIES + "test_memory_that_is_thrown_away_fails_the_checkpoint",
    ),
    (
        "one mode relies on what the other has registered since",
        "if (other != nullptr) other->ForgetRegistered(at->pages);",
        "",
        COPIES + "test_memory_that_the_other_mode_registered_since_is_registered_anew",
    ),
)
_in(
    "csrc/watch.cc",
    (
        "edges are copied late",
        "p.crc = CopyCrc32(crc, to + head.size() + middle, edges + head.size(), tail.size());",
        "p.crc = CopyCrc32(crc, to + head.size() + middle, tail.data(), tail.size());",
        PAGES + "test_what_lies_in_pages_with_others_is_of_the_moment_of_the_save",
    ),
    (
        "what cannot be watched stays lazy",
        "    s.watched = -1;\n    s.owners = 0;\n",
        "    s.watched = -1;\n",
        PAGES + "test_shared_memory_is_copied_at_once",
    ),
    (
        "the witness's answer is not passed on",
        "torn.push_back(i);",
        "(void)i;",
        ANY_WRITE,
    ),
)
