"""The wrapper: the daemon averages a module's gradients while the backward pass runs."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, Sequence

import torch

import gradsync
from gradsync.torch import _autograd, _checks, _history, _live, _optimizer_steps, _session
from gradsync.torch._buckets import MIB, BucketCaps, Buckets
from gradsync.torch._compiler import uncompiled
from gradsync.torch._gradients import Slot
from gradsync.torch._hand_off import hand_off_of
from gradsync.torch._join import uneven_inputs
from gradsync.torch._state import ModuleState
from gradsync.torch._synchronizer import Synchronizer
from gradsync.torch.step_statistics import StepStatistics

# Seconds; the daemon waits for a layout just as long.
_WRAP_TIMEOUT = 300.0


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that each backward pass leaves the average of all ranks' gradients.

    Like `torch.nn.parallel.DistributedDataParallel`, with the daemon in the place of a process
    group:

        -from torch.nn.parallel import DistributedDataParallel
        +from gradsync.torch import DistributedDataParallel
        -torch.distributed.init_process_group("gloo")
         model = DistributedDataParallel(model)

    Gradients lie in memory that is shared with the daemon; `parameter.grad` is a view of it. The
    daemon averages a bucket as soon as its last gradient is written. `backward()` returns when all
    buckets are averaged, the same on every rank.

    A backward pass is one step if its forward pass ran outside of `no_sync()`. Otherwise it only
    accumulates. Every rank must run the same number of steps, and the steps of several wrapped
    modules in the same order.

    A parameter without a gradient on this rank counts as zero. If no rank has a gradient for it,
    its `grad` stays as it is. The first steps can change the buckets, to the order in which
    gradients become ready.

    A module can be wrapped again in the same session, on every rank, as when a notebook's cell runs
    again. The old wrapper then refuses to train.

    Not thread-safe; use it on the thread that trains. `copy.deepcopy` and pickle give a wrapper of
    a copy of the module. The copy is in no job: it computes, and refuses to synchronize.

    Args:
      module: its parameters are float32, float64, float16 or bfloat16, in host memory or all on one
        GPU. Parameters that do not require a gradient now stay out, and so do those named in
        `module._ddp_params_and_buffers_to_ignore`.
      device_ids, output_device, dim, process_group: as PyTorch's; must be None, None, 0 and None.
      broadcast_buffers: whether each step ends by giving all ranks the buffers of the lowest live
        rank.
      init_sync: whether to check first that all ranks have the same module, and to give all of them
        the parameters and buffers of the rank with the most complete steps of this module, which is
        rank 0 at the start.
      bucket_cap_mb: most MiB of a bucket; None: 25. A larger parameter has a bucket of its own.
      find_unused_parameters: as PyTorch's; without effect, as unused parameters are always found.
      gradient_as_bucket_view: as PyTorch's; without effect, as gradients are always views.
      static_graph: promises that every step uses the same parameters, and each one as often as the
        first step did. A parameter that several reentrant checkpoints use needs this. The first
        step then does not overlap.
      session: the session to synchronize in; None: the process's own, which joins the job by
        torchrun's environment.
      name: name of the layout in status and statistics; None: `ddp0`, `ddp1`, ... in the order of
        wrapping.
      first_bucket_cap_mb: most MiB of the bucket that is ready first.
      last_bucket_cap_mb: most MiB of the bucket that is ready last: nothing hides its reduction.
      timeout: seconds to wait for the other ranks to wrap the module; None: 5 minutes.
      device_verdict: on a GPU, whether `backward()` returns before the host knows the step's
        verdict. Optimizers read the verdict on the GPU, as `found_inf`, and leave out the update of
        a void step, on every rank. That raises no exception; a warning and `statistics().void`
        report it. Optimizers must take `found_inf`: Adam, AdamW, SGD and Adagrad with
        `fused=True` do, with GradScaler and without. The host still waits in the module's and in an
        optimizer's first steps, in a step in which this rank left parameters unused, and for the
        norm.

    Raises:
      ValueError: an argument has no meaning here. The modules differ: every rank gets the first
        difference. `device_verdict` is set for a module in host memory, or with buffers to
        broadcast.
      TypeError: a parameter or submodule cannot be synchronized; says why and what to do.
      RuntimeError: the module is wrapped again in a backward pass.
      gradsync.Error: there is no daemon, another rank was lost or did not come, or a quota is used
        up.
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
        self._synchronizes = True  # False under no_sync()
        self._synchronizer: Synchronizer | None = None  # None in a copy, which is in no job

        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        slots = [
            Slot(parameter_name, parameter, _autograd.accumulate_node(parameter))
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
        replaced = _live.claim(module, slots, session)
        if session is None:
            session = _session.default_session()
        if name is None:
            name = _session.unique_name(session, "ddp")
        state = ModuleState(module, ignored, session, name)
        caps = BucketCaps.of_mib(bucket_cap_mb, first_bucket_cap_mb, last_bucket_cap_mb)
        wrap_timeout = _WRAP_TIMEOUT if timeout is None else timeout
        with _session.noting(session):
            trained = _history.root_of(session, module, wrap_timeout)
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
                0 if trained is None else trained,
                wrap_timeout,
            )
        old = None if replaced is None else replaced()
        buckets = Buckets(
            session, name, slots, caps, hand_off, timeout, None if old is None else old.buckets
        )
        if old is not None:
            _live.replace(old)
        self._synchronizer = Synchronizer(
            state,
            buckets,
            broadcast_buffers=broadcast_buffers,
            static_graph=static_graph,
            device_verdict=device_verdict,
            trained_before=trained is not None,
        )
        _history.remember(module, self._synchronizer.outcomes.verdicts.times)
        _live.add(self._synchronizer)
        _optimizer_steps.watch()

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass.

        Raises:
          RuntimeError: since the module was wrapped, a parameter was replaced, converted or added,
            or began to require a gradient; or this is a copy of a wrapper; or the last backward
            pass raised an exception although its step is complete.
          TypeError: PyTorch's wrapper contains this one.
          gradsync.Error: the session has ended, or the ranks' buckets differ.
        """
        synchronize = self._synchronizes
        if not torch.is_grad_enabled() or (self._synchronizer is None and not synchronize):
            return self.module(*args, **kwargs)
        synchronizer = self._in_job()
        _checks.check_not_wrapped_again(synchronizer.name, synchronizer.slots)
        synchronizer.before_forward()
        self._seen.check()
        output = self.module(*args, **kwargs)
        synchronizer.after_forward(output, synchronize)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context: a forward pass in it makes its backward pass accumulate only."""
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
        """A context for ranks with different numbers of steps: no step waits for a finished rank.

        A rank that has finished waits at the context's end until all ranks are there. Then all get
        the parameters and buffers of the rank that came last, and take part again. For several
        wrapped modules use `gradsync.torch.join`.

        Args:
          divide_by_initial_world_size: whether averages divide by the world size, also when some
            ranks have finished; must agree with the session's `divisor`. None: as the session.
          enable: False makes the context do nothing.
          timeout: seconds to wait at the context's end for ranks that still have data; None: 30
            min.

        Raises:
          ValueError: `divide_by_initial_world_size` does not agree with the session's `divisor`.
          gradsync.DeadlineExceededError: names the ranks that did not finish in time.
          gradsync.Error: a rank was lost.
        """
        with join([self], divide_by_initial_world_size, enable, timeout):
            yield

    def leave(self) -> None:
        """Ends this rank's part in the job. The others continue without it; the process can exit.

        This ends the session and so every module that is wrapped in it. To come back later, use
        `join` instead.

        Raises:
          gradsync.FailedPreconditionError: a step is open.
        """
        synchronizer = self._in_job()
        synchronizer.outcomes.abandon_stale("this rank leaves")
        synchronizer.outcomes.settle()
        synchronizer.session.leave()
        _session.end(synchronizer.session)

    def settle(self) -> None:
        """With `device_verdict`: waits on the host until every step of this module is decided.

        Call it before a session of your own leaves: it cannot leave while a step is undecided.
        `leave`, `join` and the end of the process call it themselves. Void steps raise no error
        here.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
        """
        self._in_job().outcomes.settle()

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """Result of the last complete step; None before the first.

        With `device_verdict` it waits on the host, as settle().
        """
        return None if self._synchronizer is None else self._in_job().results.last_step

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients as the last step left them.

        The daemon computed it while it averaged, so it costs no pass over the gradients. It is NaN
        or infinite if a gradient is. With `device_verdict` it waits on the host for the last step.

        Raises:
          RuntimeError: there was no step.
          gradsync.Error: the last step is void; its gradients were dropped.
        """
        return self._in_job().results.gradient_norm

    def clip_grad_norm_(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None = None
    ) -> float:
        """Scales the averaged gradients of the last step to an L2 norm of at most `max_norm`.

        The daemon knows the norm, so only a step that must be clipped costs a pass over the
        gradients, in place. With a fused `optimizer` there is no pass: it scales gradients while it
        reads them. Call this once between `backward()` and `optimizer.step()`, and change no
        gradient in between. With GradScaler call `scaler.unscale_(optimizer)` first, and then this
        with `max_norm * scaler.get_scale()` and without optimizer.

        Args:
          max_norm: largest L2 norm of all gradients together.
          optimizer: if it was built with `fused=True` and has exactly these parameters, its next
            step scales, and the gradients stay as they are.

        Returns:
          The norm before scaling.
        """
        return self._in_job().results.clip(max_norm, optimizer)

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        return self._in_job().results.statistics()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of the module, or one of PyTorch's wrapper with its `module.`."""
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
        # For a wrapper inside another module, whose state_dict() has no "module." either.
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
                "gradsync: this is a copy of a wrapped module and in no job; to train it, wrap its "
                ".module"
            )
        self._synchronizer.check_not_replaced()
        return self._synchronizer


@contextlib.contextmanager
def join(
    modules: Sequence[DistributedDataParallel],
    divide_by_initial_world_size: bool | None = None,
    enable: bool = True,
    timeout: float | None = None,
) -> Iterator[None]:
    """`DistributedDataParallel.join` for several wrapped modules of one session.

    Args:
      modules: all that are trained in the context, in the same order on every rank.
      divide_by_initial_world_size: as there.
      enable: as there.
      timeout: as there.

    Raises:
      ValueError: no modules, several sessions, or a divisor that is not the session's.
      gradsync.Error: as there.
    """
    if not enable:
        yield
        return
    synchronizers = [module._in_job() for module in modules]
    with uneven_inputs(synchronizers, divide_by_initial_world_size, timeout):
        yield
