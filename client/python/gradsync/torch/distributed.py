"""A module whose gradients the daemon averages over the ranks while its backward pass runs."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, Sequence

import torch

import gradsync
from gradsync.torch import _checks, _hooks, _live, _optimizer_steps, _session
from gradsync.torch._buckets import MIB, BucketCaps, Buckets
from gradsync.torch._gradients import Slot
from gradsync.torch._hand_off import hand_off_of
from gradsync.torch._join import join
from gradsync.torch._state import ModuleState
from gradsync.torch._synchronizer import Synchronizer
from gradsync.torch.step_statistics import StepStatistics

# Seconds; as the daemon waits for a layout.
_WRAP_TIMEOUT = 300.0


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that each backward pass leaves the average of all ranks' gradients.

    Like `torch.nn.parallel.DistributedDataParallel`, with the daemon in the place of a process
    group:

        -from torch.nn.parallel import DistributedDataParallel
        +from gradsync.torch import DistributedDataParallel
        -torch.distributed.init_process_group("gloo")
         model = DistributedDataParallel(model)

    Gradients lie in memory that is shared with the daemon; `parameter.grad` is a view of it.
    Whenever the last gradient of a bucket is there, the daemon starts to average that bucket, and
    `backward()` returns when all are averaged, on every rank alike. A forward pass under
    `no_sync()` only accumulates. A backward pass through a forward outside of it is one step: every
    rank must run as many, of each wrapped module in the same order.

    A parameter that got no gradient on this rank counts as zero; if it got none on any rank, its
    `grad` is left alone. The first step may change the buckets: to the order in which gradients
    become ready.

    Not thread-safe; use it on the thread that trains. `copy.deepcopy` and pickle give a wrapper of
    a copy of the module that is in no job: it computes, and refuses to synchronize.

    Args:
      module: with parameters of float32, float64, float16 or bfloat16, on the host or all on one
        GPU. Parameters that do not require a gradient now stay out. Names in
        `module._ddp_params_and_buffers_to_ignore` do too.
      device_ids, output_device, dim, process_group: PyTorch's; None, None, 0 and None.
      broadcast_buffers: whether each step ends with the buffers of the lowest live rank on every
        rank.
      init_sync: whether to begin with a check that all ranks have the same module, and rank 0's
        parameters and buffers on all of them.
      bucket_cap_mb: MiB of a bucket, at most; 25 if None. A larger parameter has a bucket of its
        own.
      find_unused_parameters: PyTorch's; unused parameters are always found, when the backward pass
        ends.
      gradient_as_bucket_view: PyTorch's; always on.
      static_graph: promises that every step uses the same parameters equally often. A parameter
        that is used in several reentrant checkpoints needs it; the first step does not overlap
        then.
      session: the job to synchronize in; None: the process's own, which it joins by torchrun's
        environment.
      name: of the layout in status and statistics; None: `ddp0`, `ddp1`, ... in the order of
        wrapping.
      first_bucket_cap_mb: MiB of the bucket that is ready first.
      last_bucket_cap_mb: MiB of the one that is ready last: nothing hides its reduction.
      timeout: seconds to wait for the other ranks to wrap the module; None: 5 minutes.
      device_verdict: on a GPU, whether `backward()` returns before the step's verdict is known on
        the host. Optimizers get it where they run, as `found_inf`, and leave out the update of a
        void step, on every rank alike; no exception tells of it, but `statistics().void` and a
        warning. They must take `found_inf`: Adam, AdamW, SGD and Adagrad with `fused=True` do, with
        GradScaler and without. The host waits all the same in the first steps, also of an
        optimizer, in a step in which this rank left parameters unused, and where it is asked for
        the norm.

    Raises:
      ValueError: an argument has no meaning here, or the modules differ (on every rank; says
        where); `device_verdict` in host memory, with buffers to broadcast, or before PyTorch 2.0.
      TypeError: a parameter or submodule cannot be synchronized (says why and what to do).
      gradsync.Error: the daemon is not there, another rank was lost or did not come, a quota.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        session: gradsync.Session | None = None,
        name: str | None = None,
        first_bucket_cap_mb: float = 1,
        last_bucket_cap_mb: float = 4,
        timeout: float | None = None,
        device_verdict: bool = False,
    ) -> None:
        super().__init__()
        _hooks.keep_from_compiling(DistributedDataParallel, "forward")
        _checks.check_arguments(
            device_ids,
            output_device,
            dim,
            process_group,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_cap_mb=first_bucket_cap_mb,
            last_bucket_cap_mb=last_bucket_cap_mb,
        )
        _checks.check_module(
            module, (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
        )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = True
        self.static_graph = static_graph
        self._synchronizes = True  # outside of no_sync()
        self._synchronizer: Synchronizer | None = None  # in a copy, which is in no job

        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        slots = [
            Slot(parameter_name, parameter, _hooks.accumulate_node(parameter))
            for parameter_name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter_name not in ignored
        ]
        hand_off = hand_off_of(slots[0].parameter.device)
        if device_verdict:
            buffers = [
                b for b, _ in module.named_buffers() if broadcast_buffers and b not in ignored
            ]
            _checks.check_device_verdict(slots[0].parameter.device, buffers)
        self._seen = _checks.Identity(module)
        _live.claim(slots)
        if session is None:
            session = _session.default_session()
        if name is None:
            name = _session.unique_name(session, "ddp")
        state = ModuleState(module, ignored, session, name)
        caps = BucketCaps.of_mib(bucket_cap_mb, first_bucket_cap_mb, last_bucket_cap_mb)
        if init_sync:
            state.agree(
                [
                    f"bucket_cap_mb={caps.each / MIB:g}",
                    f"first_bucket_cap_mb={caps.first / MIB:g}",
                    f"last_bucket_cap_mb={caps.last / MIB:g}",
                    f"broadcast_buffers={broadcast_buffers}",
                    f"static_graph={static_graph}",
                    f"device_verdict={device_verdict}",
                ],
                {slot.name for slot in slots},
                _WRAP_TIMEOUT if timeout is None else timeout,
            )
        self._synchronizer = Synchronizer(
            state,
            Buckets(session, name, slots, caps, hand_off, timeout),
            broadcast_buffers=broadcast_buffers,
            static_graph=static_graph,
            device_verdict=device_verdict,
        )
        _optimizer_steps.watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass.

        Raises:
          RuntimeError: a parameter was replaced, converted, added, or began to require a gradient
            since the module was wrapped; or this is a copy of a wrapper, and gradients are enabled.
          gradsync.Error: the session has ended, or another rank's buckets could not be agreed with.
        """
        synchronize = self._synchronizes
        if not torch.is_grad_enabled() or (self._synchronizer is None and not synchronize):
            return self.module(*args, **kwargs)
        synchronizer = self._in_job()
        synchronizer.before_forward()
        self._seen.check()
        output = self.module(*args, **kwargs)
        synchronizer.after_forward(output, synchronize)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context forward passes only accumulate; the next one outside synchronizes."""
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool | None = None,
        enable: bool = True,
        timeout: float | None = None,
    ) -> Iterator[None]:
        """For ranks with different numbers of steps: nobody waits for one that has no more.

        At its end, the context waits until every rank has come to it, and gives all of them the
        parameters and buffers of the rank that came last. Then all take part again. For several
        wrapped modules use `gradsync.torch.join`.

        Args:
          divide_by_initial_world_size: whether averages divide by the world size also when ranks
            have come to their end; must be the session's `divisor`. None: as the session does.
          enable: False makes the context do nothing.
          timeout: seconds that a rank waits at the context's end for the others, which have data
            still; None: 30 min.

        Raises:
          ValueError: `divide_by_initial_world_size` is not what the session was joined with.
          gradsync.DeadlineExceededError: names the ranks that did not come to the end.
          gradsync.Error: a rank was lost.
        """
        with join([self], divide_by_initial_world_size, enable, timeout):
            yield

    def leave(self) -> None:
        """Ends this rank's part in the job: the others go on without it, and the process may exit.

        Ends the session, with all modules that are wrapped in it. Use `join` to come back.

        Raises:
          gradsync.FailedPreconditionError: a step is open.
        """
        synchronizer = self._in_job()
        synchronizer.abandon_stale("this rank leaves")
        synchronizer.settle()
        synchronizer.session.leave()
        _session.end(synchronizer.session)

    def settle(self) -> None:
        """With `device_verdict`: waits on the host until every step of this module is decided.

        For a session of your own, before it leaves: while a step is not decided it cannot. `leave`,
        `join` and the end of the process do so by themselves. Void steps are no error here.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
        """
        self._in_job().settle()

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """The last committed step; None before the first.

        With `device_verdict` it waits, as settle().
        """
        return None if self._synchronizer is None else self._synchronizer.last_step

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients as the last step left them.

        The daemon computed it while it averaged: no pass over the gradients. NaN or infinite if a
        gradient is. With `device_verdict` it waits for the last step's verdict on the host.

        Raises:
          RuntimeError: there was no step.
          gradsync.Error: the last step is void; its gradients are dropped.
        """
        return self._in_job().gradient_norm

    def clip_grad_norm_(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None = None
    ) -> float:
        """Scales the averaged gradients of the last step down so that their L2 norm is at most
        `max_norm`.

        The norm needs no pass over the gradients, and nor does a step that need not be clipped.
        Scaling is one multiplication per bucket, in place; a fused optimizer does it while it reads
        the gradients. Call it once between `backward()` and `optimizer.step()`, with gradients that
        nothing else has changed since. With GradScaler call `scaler.unscale_(optimizer)` first,
        and this with `max_norm * scaler.get_scale()` and no optimizer.

        Args:
          max_norm: of all gradients together.
          optimizer: if it was built with `fused=True` and has these parameters and no others, it
            is told the scale for its next step, and the gradients are left alone.

        Returns:
          The norm before.
        """
        return self._in_job().clip(max_norm, optimizer)

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        return self._in_job().statistics()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own: no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the wrapped module's, with or without the `module.` of PyTorch's wrapper."""
        prefix = "module."
        own = self.module.state_dict().keys()
        if (
            state_dict
            and all(key.startswith(prefix) for key in state_dict)
            and not any(key.startswith(prefix) for key in own)
        ):
            state_dict = {key[len(prefix) :]: value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # As a part of another module: its state_dict() has no "module." either.
        inner = f"{prefix}module."
        if not any(key.startswith(inner) for key in state_dict):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_seen", None)
        state["_synchronizer"] = None
        return state

    def _in_job(self) -> Synchronizer:
        if self._synchronizer is None:
            raise RuntimeError(
                "gradsync: this is a copy of a wrapped module, and in no job; wrap its .module to "
                "train it"
            )
        return self._synchronizer
