"""Lists the private names of other packages that lazyckpt relies on, and refuses a version that lacks one.

A package may drop a private name in any version. ``NEEDED`` has those without which lazyckpt cannot work, or not
safely: importing lazyckpt, or an integration, then raises ImportError before training begins. ``OPTIONAL`` has those
that lazyckpt can do without, and says what it does instead. tests/test_private_names.py finds every use in the sources
and compares it with these lists.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import platform
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from lazyckpt._version import __version__

# By the package, or the part of one, that is checked at once: owner -> its names. An attribute that the constructor of
# a class sets is a name of the class. Of two with "|" between them, one is enough. Names in private modules and classes
# are private, too.
NEEDED: Mapping[str, Mapping[str, str]] = {
    "python": {
        "pickle": "_Unpickler",
        "threading": "_DummyThread _register_atexit",
        "threading.Condition": "_is_owned _lock",
        "_thread.RLock": "_is_owned",
        "concurrent.futures.Future": "_condition _done_callbacks _waiters",
    },
    "torch": {
        "torch": "_neg_view _storage_classes _tensor_classes",
        "torch.Tensor": "_backward_hooks _cdata _nnz _version",
        "torch.UntypedStorage": "_cdata _expired _free_weak_ref _share_fd_cpu_ _share_filename_cpu_ _weak_ref",
        "torch.storage": "_dtype_to_storage_type_map _new_dtypes",
        "torch.storage.TypedStorage": "_pickle_storage_type _size _untyped_storage",
        "torch.serialization": "_get_restore_location _serialization_tls",
        "torch._weights_only_unpickler": "Unpickler _get_allowed_globals _get_user_allowed_globals",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch._utils": (
            "_rebuild_parameter _rebuild_parameter_with_state _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
            "_validate_loaded_sparse_tensors"
        ),
        "torch._C": (
            "DisableTorchFunction _current_graph_task_id _dispatch_tls_is_dispatch_key_excluded "
            "_len_torch_dispatch_stack _len_torch_function_stack"
        ),
        "torch._C.DispatchKey": "ADInplaceOrView",
        "torch._ops.OpOverload": "_schema",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "tree_leaves",
        "torch.utils.data.DataLoader": "_iterator",
        "torch.nn.Module": (
            "_buffers _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks _modules "
            "_non_persistent_buffers_set _parameters _save_to_state_dict _state_dict_hooks _state_dict_pre_hooks "
            "_version"
        ),
        "torch.optim.Optimizer": "_optimizer_load_state_dict_pre_hooks _optimizer_step_pre_hooks",
        "torch.optim.optimizer": "_global_optimizer_pre_hooks",
    },
    "torch.distributed": {  # for several ranks
        "torch.distributed.distributed_c10d": "_get_default_store",
    },
    "torch.distributed.checkpoint": {  # for folders of torch.distributed.checkpoint
        "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
        "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
        "torch.distributed.checkpoint._nested_dict": "flatten_state_dict",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
        "torch.distributed.tensor.DTensor": "_local_tensor _spec",
        "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
    },
    "lightning": {
        "lightning.fabric.utilities.data": "_set_sampler_epoch",
        "lightning.fabric.utilities.types": "_Stateful",
        "lightning.pytorch.callbacks.ModelCheckpoint": (
            "_ModelCheckpoint__resolve_ckpt_dir _every_n_train_steps _find_last_checkpoints _last_global_step_saved "
            "_link_checkpoint _remove_checkpoint _save_checkpoint _save_last_checkpoint _save_monitor_checkpoint "
            "_save_none_monitor_checkpoint _save_topk_checkpoint _update_best_and_save"
        ),
        "lightning.pytorch.callbacks.StochasticWeightAveraging": "_average_model",
        "lightning.pytorch.callbacks.WeightAveraging": "_average_model _copy_average_to_current _swap_models",
        "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": "_combined_loader",
        "lightning.pytorch.loops.fit_loop._FitLoop": "_combined_loader _data_fetcher _load_combined_loader_states",
        "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": (
            "_batches_that_stepped _num_ready_batches_reached _should_accumulate _should_check_val_fx"
        ),
        "lightning.pytorch.strategies.DeepSpeedStrategy": "_checkpoint_io _setup_model_and_optimizer",
        "lightning.pytorch.strategies.ModelParallelStrategy": "_checkpoint_io _save_distributed_checkpoint",
        "lightning.pytorch.trainer.connectors.callback_connector._CallbackConnector": "_reorder_callbacks",
        "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": "_slurm_sigusr_handler_fn",
        "lightning.pytorch.utilities.combined_loader.CombinedLoader": "_flattened _mode",
    },
    "accelerate": {
        "accelerate.Accelerator": "_models _optimizers _save_model_state_pre_hook",
        "accelerate.utils.fsdp_utils": "_get_model_state_dict _prepare_sd_options",
    },
    "transformers": {
        "transformers.Trainer": (
            "_finalize_training|_sorted_checkpoints _get_output_dir _load_best_model _load_from_checkpoint "
            "_push_from_checkpoint _save _save_checkpoint _save_optimizer_and_scheduler"
        ),
    },
    "deepspeed": {
        "deepspeed.runtime.engine.DeepSpeedEngine": (
            "_config _configure_checkpointing _copy_recovery_script _save_moe_checkpoint"
        ),
        "deepspeed.runtime.config.DeepSpeedConfig": "_param_dict",
    },
    "torchtitan": {
        "torchtitan.components.checkpointer.CheckpointManager": (
            "_close _find_load_step _load _purge_stale_checkpoints _save _should_purge _should_save _wait_for_saving"
        ),
    },
}

# What lazyckpt does without the name.
OPTIONAL: Mapping[str, str] = {
    "torch._C._dispatch_keys": "asks tensors for their facts through Python, more slowly",
    "aoti_torch_get_…": "does the same without these functions of libtorch_cpu.so (csrc/python/tensor_words.h)",
    "torch._utils._sparse_tensors_to_validate": "uses the list of the thread, in torch.serialization",
    "torch.distributed.optim.ZeroRedundancyOptimizer._overlap_with_ddp": "copies its parameters inside save()",
    "torch.nn.modules.batchnorm._NormBase._load_from_state_dict": "takes batch norm for a module with its own loader",
    "torch.optim.Optimizer._accelerator_graph_capture_health_check": "waits for the copies before the closure",
    "torch.optim.Optimizer._cuda_graph_capture_health_check": "the same; older versions of torch have this one",
    "torch.optim.optimizer._use_grad_for_differentiable": "waits for the copies before the closure",
    "torch._dynamo.OptimizedModule._orig_mod": "refuses to publish the weights of a compiled module",
    "transformers.PreTrainedModel._hf_peft_config_loaded": "publishes a model with adapters as it is",
    "OrderedDict._metadata": "saves a state dict without the versions of its modules",
    "transformers.Trainer._load_optimizer_and_scheduler": "leaves the load of the optimizer to the Trainer",
    "transformers.integrations.WandbCallback._log_model": "waits until the checkpoint is durable",
    "transformers.integrations.MLflowCallback._log_artifacts": "waits until the checkpoint is durable",
    "transformers.integrations.NeptuneCallback._should_upload_checkpoint": "waits until the checkpoint is durable",
}

_STORE_ATTR = dis.opmap["STORE_ATTR"]
_checked: set[str] = set()


class MissingNameError(ImportError):
    """A package lacks a name that lazyckpt needs."""


def check(*parts: str) -> None:
    """Raises MissingNameError if a package lacks a name of ``NEEDED[part]``, or is missing. Looks once per process;
    imports the modules that have the names."""
    for part in parts:
        for owner, names in NEEDED[part].items() if part not in _checked else ():
            try:
                found = _object(owner)
            except ImportError as error:
                raise _refusal(part, f"{owner}.{names.split()[0]}") from error
            for name in names.split():
                if not any(_has(found, one) for one in name.split("|")):
                    raise _refusal(part, f"{owner}.{name}")
        _checked.add(part)


@contextlib.contextmanager
def needed(part: str) -> Iterator[None]:
    """A context for the imports of an integration: checks the names first, and raises MissingNameError for an import
    that fails."""
    check(part)
    try:
        yield
    except MissingNameError:
        raise
    except ImportError as error:
        raise _refusal(part, None, error) from error


def find(name: str) -> Any:
    """Returns the object of an optional name; None if there is none."""
    assert name in OPTIONAL
    owner, _, last = name.rpartition(".")
    try:
        return getattr(_object(owner), last, None)
    except ImportError:
        return None


def _object(path: str) -> Any:
    """Returns a module, or an object inside of one. Raises ImportError if there is none."""
    first, *others = path.split(".")
    found = importlib.import_module(first)
    for length, part in enumerate(others, 1):
        inside = getattr(found, part, None)
        found = importlib.import_module(".".join([first, *others[:length]])) if inside is None else inside
    return found


def _has(found: Any, name: str) -> bool:
    """Whether an object has an attribute; of a class, also one that its methods set."""
    return hasattr(found, name) or (isinstance(found, type) and any(_sets(kind, name) for kind in found.__mro__))


def _sets(kind: type, name: str) -> bool:
    members = vars(kind)
    codes = (inspect.unwrap(member).__code__ for member in members.values() if inspect.isfunction(member))
    return name in members.get("__annotations__", ()) or any(_stores(code, name) for code in codes)


def _stores(code: CodeType, name: str) -> bool:
    """Whether a function sets an attribute. ``dis`` would take milliseconds to tell."""
    if name not in code.co_names:
        return False
    steps = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    return (_STORE_ATTR, code.co_names.index(name) & 0xFF) in steps


def _refusal(part: str, name: str | None, error: ImportError | None = None) -> MissingNameError:
    from importlib import metadata  # takes milliseconds

    package = part.partition(".")[0]
    if package == "python":
        return MissingNameError(
            f"lazyckpt {__version__} needs {name}, which Python {platform.python_version()} does not have: use another "
            "version of Python, or pip install --upgrade lazyckpt"
        )
    supported = package
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("lazyckpt") or ():
            requirement, _, marker = line.partition(";")
            if re.match(rf"{package}\b(?!-)", requirement) and (not marker or f'extra == "{package}"' in marker):
                supported = requirement.strip()
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return MissingNameError(f"lazyckpt needs {supported}, which is not installed: pip install '{supported}'")
    lacks = f"{name}, which {package} {version} does not have" if name else f"another {package} than {version}: {error}"
    return MissingNameError(
        f"lazyckpt {__version__} needs {lacks} (lazyckpt supports {supported}): pip install '{supported}' if yours "
        "is older, pip install --upgrade lazyckpt if it is newer"
    )
