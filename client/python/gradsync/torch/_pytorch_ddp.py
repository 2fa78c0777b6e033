"""What makes a wrapper one of PyTorch's: its attributes and methods, without its reducer."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from typing import Any, Collection, Mapping, Sequence

import torch
from torch.distributed.algorithms.join import Joinable

from gradsync.torch import _logging_data
from gradsync.torch._buckets import BucketCaps
from gradsync.torch._checks import check_device_verdict
from gradsync.torch._devices import check_devices
from gradsync.torch._join import EarlyEnd
from gradsync.torch._pytorch_join import JoinHook
from gradsync.torch._reducer import NoReducer, refused
from gradsync.torch._synchronizer import Synchronizer


class PyTorchDdp(torch.nn.parallel.DistributedDataParallel):
    """PyTorch's wrapper as libraries and scripts know it; it averages nothing itself.

    Libraries recognize a wrapped module by its class, and read attributes of PyTorch's wrapper.
    PyTorch's constructor does not run: it would build the reducer, which needs a process group.
    What needs the reducer is refused by name.

    Args:
      module: to be wrapped.
      ignored: names of parameters and buffers that stay out.
      device_ids: as PyTorch's; see check_devices().
      output_device: as PyTorch's.
      dim: as PyTorch's: of scatter() and gather() only.
      sync_buffers: whether each step ends with the same buffers on every rank.
      caps: of the buckets.
      find_unused_parameters: remembered.
      skip_all_reduce_unused_params: remembered.
      batched_grad_copy: remembered.
    """

    reducer: Any  # PyTorch's has another type

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str],
        *,
        device_ids: Sequence[Any] | None,
        output_device: Any,
        dim: int,
        sync_buffers: bool,
        caps: BucketCaps,
        find_unused_parameters: bool,
        skip_all_reduce_unused_params: bool,
        batched_grad_copy: bool,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self._synchronizer: Synchronizer | None = None  # None in a copy, which is in no job
        self._join_hook: JoinHook | EarlyEnd | None = None  # what forward passes notify
        self.module = module
        self.parameters_to_ignore = set(ignored)
        self._module_parameters = [
            parameter for name, parameter in module.named_parameters() if name not in ignored
        ]
        devices = dict.fromkeys(parameter.device for parameter in self._module_parameters)
        self.device_ids, self.output_device = check_devices(device_ids, output_device, devices)
        self.device = next(iter(devices))
        self.device_type = self.device.type
        self.is_multi_device_module = len(devices) > 1
        self.dim = dim
        self._sync_buffers_in_steps = sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.gradient_as_bucket_view = True
        self.static_graph = False
        self.mixed_precision = None
        self.require_backward_grad_sync = True  # False under no_sync()
        self.require_forward_param_sync = True
        self.logger = None
        self.reducer = NoReducer(None)
        self.bucket_bytes_cap = caps.each
        self.bucket_bytes_cap_list: list[int] = []
        self.bucket_bytes_cap_default = caps.first < caps.each
        self.broadcast_bucket_size = 250 << 20
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        self._use_python_reducer = False
        self._lazy_init_ran = True
        self._delay_all_reduce_params: list[torch.nn.Parameter] = []
        self._delay_all_reduce_all_params = False
        self._delay_grad_buffer = None
        self._delay_grad_views: list[torch.Tensor] = []
        self._comm_hooks: list[Any] = []
        self._accum_grad_hooks: list[Any] = []
        self._ddp_sink_clone = True
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]

    # ---- In a job or not

    def _in_job(self) -> Synchronizer:
        if self._synchronizer is None:
            raise RuntimeError(
                "gradsync: this is a copy of a wrapped module and in no job; to train it, wrap its "
                ".module"
            )
        self._synchronizer.check_not_replaced()
        return self._synchronizer

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_seen", "reducer"):
            state.pop(name, None)
        state["_synchronizer"] = state["_join_hook"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self.reducer = NoReducer(None)

    # ---- The process group

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """PyTorch's default group; None if there is none. Gradients do not travel in it."""
        return torch.distributed.group.WORLD if torch.distributed.is_available() else None

    @property
    def _distributed_rank(self) -> int:
        return self._in_job().session.rank

    # ---- Uneven inputs, by torch.distributed.algorithms.join.Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For PyTorch's `Join`, which joins this module with other joinables, as an optimizer.

        Args:
          **kwargs: `divide_by_initial_world_size`, as of join().
        """
        by_world = kwargs.get("divide_by_initial_world_size", True)
        hook = JoinHook(self, self._in_job(), by_world)
        self._join_hook = hook
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device on which PyTorch's `Join` counts ranks."""
        device: torch.device = self.device
        return device

    @property
    def join_process_group(self) -> Any:
        """The process group in which PyTorch's `Join` counts ranks.

        Raises:
          RuntimeError: there is none.
        """
        if self.process_group is None:
            raise RuntimeError(
                "gradsync: PyTorch's Join counts ranks in a process group, and there is none; use "
                "model.join() or gradsync.torch.join([...]), which need none, or call "
                "torch.distributed.init_process_group() first"
            )
        return self.process_group

    # ---- What PyTorch's wrapper tells about itself

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._synchronizer is not None and self._synchronizer.buckets.rebuilt

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is known, under the names that PyTorch's wrapper uses.

        `can_set_static_graph` is 0: here `static_graph` brings no speed.
        """
        data: dict[str, Any] = {
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "is_multi_device_module": int(self.is_multi_device_module),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": 0,
            **_logging_data.of_module(self.module),
        }
        if self._synchronizer is not None:
            data.update(_logging_data.of_steps(self._synchronizer))
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Without effect: every step is counted.

        Raises:
          ValueError: `sample_rate` is less than 1.
        """
        if sample_rate < 1:
            raise ValueError(f"gradsync: sample_rate must be at least 1, not {sample_rate}")

    def _check_reducer_finalized(self) -> None:
        """Raises: RuntimeError: the last backward pass has not finished its step."""
        step = self._in_job().outcomes.step
        if step is not None:
            raise RuntimeError(
                f"gradsync: step {step.number} is open: its backward pass raised an exception, or "
                "has not ended; run the next forward pass, which abandons it"
            )

    # ---- What changes how it synchronizes

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether steps give all ranks the same buffers. Set it on every rank alike.

        Raises:
          ValueError: set to True, although steps' verdicts stay on the device and the module has
            buffers.
        """
        value: bool = self._sync_buffers_in_steps
        return value

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        if self._synchronizer is not None:
            if value and self._synchronizer.device_verdict:
                check_device_verdict(self.device, list(self.named_module_buffers))
            self._synchronizer.outcomes.broadcast_buffers = value
        self._sync_buffers_in_steps = value

    @property
    def broadcast_buffers(self) -> bool:
        """Another name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """As the constructor's `static_graph`; every rank must call it, before the first step.

        Raises:
          RuntimeError: there was a step.
        """
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self._in_job().expect_static_graph()
        self.static_graph = True

    def _sync_buffers(self) -> None:
        """Gives all ranks the buffers of the lowest live rank now; every rank must call it.

        Raises:
          gradsync.Error: a rank was lost or did not come.
        """
        self._in_job().outcomes.broadcast_buffers_now()
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]

    _advice = (
        "gradsyncd averages the gradients; to use a hook, wrap the module with "
        "torch.nn.parallel.DistributedDataParallel"
    )
    register_comm_hook = refused("register_comm_hook", _advice)
    _register_builtin_comm_hook = refused("_register_builtin_comm_hook", _advice)
    _register_buffer_comm_hook = refused(
        "_register_buffer_comm_hook",
        "each step gives all ranks the buffers of the lowest live rank; to do it otherwise, pass "
        "forward_sync_buffers=False, and call gradsync.Session.all_reduce() after the step",
    )
    _register_fused_optim = refused(
        "_register_fused_optim",
        "put the optimizer into the backward pass by "
        "torch.distributed.optim._apply_optimizer_in_backward",
    )
    _set_sparse_metadata = refused(
        "_set_sparse_metadata", "gradients are dense; build the module with sparse=False"
    )
    _update_process_group = refused(
        "_update_process_group",
        "a job's ranks do not change; leave(), and wrap the module again in a session of the new "
        "ranks",
    )
    _remove_autograd_hooks = refused(
        "_remove_autograd_hooks",
        "gradients would stay local without a word; delete the wrapper, and train its .module",
    )
    del _advice

    # ---- What PyTorch's wrapper does for itself, in its reducer and process group

    _sync_buffers_advice = (
        "gradsyncd broadcasts the buffers, without a process group; call _sync_buffers() on every "
        "rank"
    )
    _sync_module_buffers = refused("_sync_module_buffers", _sync_buffers_advice)
    _default_broadcast_coalesced = refused("_default_broadcast_coalesced", _sync_buffers_advice)
    _check_and_sync_module_buffers = refused("_check_and_sync_module_buffers", _sync_buffers_advice)
    del _sync_buffers_advice

    _group_advice = (
        "the wrapper has no process group of its own; call gradsync.Session.broadcast() or "
        ".all_reduce(), or use torch.distributed"
    )
    _distributed_broadcast_coalesced = refused("_distributed_broadcast_coalesced", _group_advice)
    _find_common_rank = refused("_find_common_rank", _group_advice)
    _check_default_group = refused("_check_default_group", _group_advice)
    del _group_advice

    _forward_advice = "call the wrapped module itself, which does all that a forward pass needs"
    _pre_forward = refused("_pre_forward", _forward_advice)
    _post_forward = refused("_post_forward", _forward_advice)
    _run_ddp_forward = refused("_run_ddp_forward", _forward_advice)
    _lazy_init = refused("_lazy_init", _forward_advice)
    _root_copy_hook = refused("_root_copy_hook", _forward_advice)
    _module_wait_for_copy_hook = refused("_module_wait_for_copy_hook", _forward_advice)
    del _forward_advice

    _reducer_advice = (
        "PyTorch's reducer is not built, as gradsyncd averages the gradients; if you need it, use "
        "torch.nn.parallel.DistributedDataParallel with gradsync.torch.allreduce_hook"
    )
    _ddp_init_helper = refused("_ddp_init_helper", _reducer_advice)
    _build_params_for_reducer = refused("_build_params_for_reducer", _reducer_advice)
    _register_accum_grad_hook = refused("_register_accum_grad_hook", _reducer_advice)
    _fire_reducer_autograd_hook = refused("_fire_reducer_autograd_hook", _reducer_advice)
    _setup_in_backward_optimizers = refused("_setup_in_backward_optimizers", _reducer_advice)
    _delayed_all_reduce_hook = refused("_delayed_all_reduce_hook", _reducer_advice)
    _register_delay_all_reduce_hook = refused("_register_delay_all_reduce_hook", _reducer_advice)
    _clear_grad_buffer = refused("_clear_grad_buffer", _reducer_advice)
    del _reducer_advice

    _join_advice = "call join(), or use PyTorch's Join([model, ...])"
    _check_global_requires_backward_grad_sync = refused(
        "_check_global_requires_backward_grad_sync", _join_advice
    )
    _match_all_reduce_for_bwd_pass = refused("_match_all_reduce_for_bwd_pass", _join_advice)
    _match_unused_params_allreduce = refused("_match_unused_params_allreduce", _join_advice)
    _sync_final_model = refused("_sync_final_model", _join_advice)
    del _join_advice

    # ---- State dicts

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's; a state dict of the bare module fits, too."""
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None and not any(key.startswith("module.") for key in state_dict):
            # Modules find there the version of what they saved.
            inner = OrderedDict((f"module.{key}", value) for key, value in state_dict.items())
            inner._metadata = OrderedDict(  # type: ignore[attr-defined]
                (f"module.{path}".rstrip("."), value) for path, value in metadata.items()
            )
            state_dict = inner
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A state dict of the bare module has no "module." in its keys. It fits, too.
        inner = f"{prefix}module."
        if not any(key.startswith(inner) for key in state_dict):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
