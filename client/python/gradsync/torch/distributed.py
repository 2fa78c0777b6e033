"""The wrapper: the daemon averages a module's gradients while the backward pass runs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Iterator, Sequence

import torch

import gradsync
from gradsync.torch import _checks, _session
from gradsync.torch._arguments import (
    Options,
    check_caps,
    check_process_group,
    check_refused,
    check_same_ranks,
    sync_buffers,
)
from gradsync.torch._buckets import BucketCaps
from gradsync.torch._compiler import uncompiled
from gradsync.torch._join import EarlyEnd, session_of, uneven_inputs
from gradsync.torch._pytorch_ddp import PyTorchDdp
from gradsync.torch._reducer import NoReducer
from gradsync.torch._wrapping import wrap
from gradsync.torch.step_statistics import StepStatistics


class DistributedDataParallel(PyTorchDdp):
    """Wraps a module so that each backward pass leaves the average of all ranks' gradients.

    It is a `torch.nn.parallel.DistributedDataParallel`, with the daemon in the place of a process
    group and of PyTorch's reducer:

        -from torch.nn.parallel import DistributedDataParallel
        +from gradsync.torch import DistributedDataParallel
         model = DistributedDataParallel(model)

    It takes every argument of PyTorch's wrapper. docs/pytorch-ddp.md says of each argument and
    method whether it does the same here, more, or is refused.

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
    a copy of the module, which is in no job at first. The first forward pass that trains it wraps
    it in the process's own session, on every rank together. If the wrapper was made with `session`,
    its copies refuse to train.

    Args:
      module: its parameters are float32, float64, float16 or bfloat16, in host memory or all on one
        GPU. Parameters that require no gradient when the module is wrapped stay out, and so do
        those named in `module._ddp_params_and_buffers_to_ignore`.
      device_ids: None, or [the module's own GPU], to which forward passes then move their inputs.
      output_device: None, or the same GPU.
      dim: as PyTorch's, of scatter() and gather().
      broadcast_buffers: whether all ranks start with the same buffers, and each step ends by giving
        all ranks those of the lowest live rank; None: they do.
      init_sync: whether to check first that all ranks have the same module, and to give all of them
        the parameters and buffers of the rank with the most complete steps of this module, which is
        rank 0 at the start.
      process_group: None, or PyTorch's default group, if it has the job's ranks.
      bucket_cap_mb: most MiB of a bucket; None: 25. A larger parameter has a bucket of its own.
      find_unused_parameters: without effect, as unused parameters are always found.
      check_reduction: without effect, as in PyTorch.
      gradient_as_bucket_view: without effect, as gradients are always views.
      static_graph: promises that each step uses a parameter as often as the first step did, or not
        at all. A parameter that several reentrant checkpoints use needs this. The first step then
        does not overlap.
      delay_all_reduce_named_params: must be None.
      param_to_hook_all_reduce: must be None.
      mixed_precision: must be None; use torch.autocast.
      device_mesh: must be None; choose a job by `session`.
      skip_all_reduce_unused_params: without effect.
      bucket_cap_mb_list: must be None; use the three caps.
      batched_grad_copy: without effect.
      forward_sync_buffers: as `broadcast_buffers`, for steps alone; None: as `broadcast_buffers`.
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
        `fused=True` do, with GradScaler and without. The host still waits for the norm, and in
        these steps: the first ones of the module and of an optimizer, those in a `join` context,
        and those in which this rank left parameters unused or a parameter has a user's hook.

    Raises:
      ValueError: an argument is not supported here; says what to do instead. The modules differ:
        every rank gets the first difference. `device_verdict` is set for a module in host memory,
        or with buffers to broadcast.
      TypeError: a parameter or submodule cannot be synchronized; says why and what to do.
      RuntimeError: the module is wrapped again in a backward pass.
      gradsync.Error: there is no daemon, another rank was lost or did not come, or a quota is used
        up. LOSS_POLICY: this module does not work with `on_rank_loss="hold"`; says why.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        session: gradsync.Session | None = None,
        name: str | None = None,
        first_bucket_cap_mb: float = 1,
        last_bucket_cap_mb: float = 4,
        timeout: float | None = None,
        device_verdict: bool = False,
    ) -> None:
        check_refused(
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        check_process_group(process_group)
        check_caps(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_cap_mb=first_bucket_cap_mb,
            last_bucket_cap_mb=last_bucket_cap_mb,
        )
        _checks.check_module(module)
        step_buffers, init_buffers = sync_buffers(broadcast_buffers, forward_sync_buffers)
        caps = BucketCaps.of_mib(bucket_cap_mb, first_bucket_cap_mb, last_bucket_cap_mb)
        super().__init__(
            module,
            getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            sync_buffers=step_buffers,
            caps=caps,
            find_unused_parameters=find_unused_parameters,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        self.static_graph = static_graph
        self._own_session = session is not None
        self._options = Options(
            caps=caps,
            sync_buffers=step_buffers,
            init_sync=init_sync,
            init_sync_buffers=init_buffers,
            static_graph=static_graph,
            device_verdict=device_verdict,
            timeout=timeout,
        )
        if process_group is not None:
            session = session or _session.default_session()
            check_same_ranks(process_group, session)
        self._begin(session, name)

    def _begin(self, session: gradsync.Session | None, name: str | None) -> None:
        """Takes part in the job; every rank does, in the same order."""
        self._seen = _checks.Identity(self.module)
        self._synchronizer = wrap(
            self.module, self.parameters_to_ignore, self._options, session, name
        )
        self.reducer = NoReducer(self._synchronizer)

    @uncompiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass.

        Raises:
          RuntimeError: since the module was wrapped, a parameter was replaced, converted or added,
            or began to require a gradient; or this is a copy of a wrapper with a session of its
            own; or the last backward pass raised an exception although its step is complete.
          TypeError: PyTorch's wrapper contains this one.
          gradsync.Error: the session has ended, or the ranks' buckets differ.
        """
        synchronize = self.require_backward_grad_sync
        if self._join_hook is not None:
            self._join_hook.at_forward()
        if self.device_ids and (inputs or kwargs):
            moved: Any = self.to_kwargs  # without types
            all_inputs, all_kwargs = moved(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = all_inputs[0], all_kwargs[0]
        if not torch.is_grad_enabled() or (self._synchronizer is None and not synchronize):
            return self.module(*inputs, **kwargs)
        if self._synchronizer is None and not self._own_session:
            self._begin_copy()
        synchronizer = self._in_job()
        _checks.check_not_wrapped_again(synchronizer.name, synchronizer.slots)
        synchronizer.before_forward()
        self._seen.check()
        output = self.module(*inputs, **kwargs)
        synchronizer.after_forward(output, synchronize)
        return output

    def _begin_copy(self) -> None:
        """A copy of a wrapper trains for the first time."""
        _checks.check_module(self.module)
        self._options = dataclasses.replace(
            self._options, static_graph=self.static_graph, sync_buffers=self.forward_sync_buffers
        )
        self._begin(None, None)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        timeout: float | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context for ranks with different numbers of steps: no step waits for a finished rank.

        A rank that has finished waits at the context's end until all ranks are there. Then all get
        the parameters of the rank that came last, with its buffers if buffers are synchronized, and
        take part again. For several wrapped modules use `gradsync.torch.join`.

        Args:
          divide_by_initial_world_size: True: averages divide by the world size, also when some
            ranks have finished. False: by the number of ranks that still have data.
          enable: False makes the context do nothing.
          throw_on_early_termination: whether every rank gets a RuntimeError when the first one has
            no more data: that rank at the context's end, the others at their next forward pass.
          timeout: seconds to wait at the context's end for ranks that still have data; None: 30
            min.

        Raises:
          gradsync.DeadlineExceededError: names the ranks that did not finish in time.
          gradsync.AbortedError: RANK_LOST: a rank was lost while this one waited or trained.
        """
        return join(
            [self],
            divide_by_initial_world_size,
            enable,
            throw_on_early_termination,
            timeout=timeout,
        )

    def leave(self) -> None:
        """Ends this rank's part in the job. The others continue without it; the process can exit.

        This ends the session and so every module that is wrapped in it. To come back later, use
        `join` instead. With `on_rank_loss="hold"` every rank calls it after the same step.

        Raises:
          gradsync.FailedPreconditionError: a step is open. With "hold": an exception is being
            handled, so the rank's work is not done.
          gradsync.AbortedError: RANK_FINISHED: with "hold", another rank has begun a step.
        """
        synchronizer = self._in_job()
        session = synchronizer.session
        session._check_may_leave("leave()")  # before other ranks hear anything
        synchronizer.outcomes.abandon_stale("this rank leaves")
        synchronizer.outcomes.settle()
        with _session.noting(session):
            session.leave()
        _session.end(session)

    def settle(self) -> None:
        """With `device_verdict`: waits on the host until every step of this module is decided.

        Call it before a session of your own leaves: it cannot leave while a step is undecided.
        `leave`, `join` and the end of the process call it themselves. A void step raises no error
        here, unless GradScaler has counted it.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
          RuntimeError: GradScaler has counted a step that is void.
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


@contextlib.contextmanager
def join(
    modules: Sequence[DistributedDataParallel],
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
    *,
    timeout: float | None = None,
) -> Iterator[None]:
    """`DistributedDataParallel.join` for several wrapped modules of one session.

    Args:
      modules: all that are trained in the context, in the same order on every rank. The forward
        passes of the first one look for an early termination.
      divide_by_initial_world_size: as there.
      enable: as there.
      throw_on_early_termination: as there.
      timeout: as there.

    Raises:
      ValueError: no modules, or several sessions.
      gradsync.Error: as there.
    """
    if not enable:
        yield
        return
    synchronizers = [module._in_job() for module in modules]
    session = session_of(synchronizers)
    early_end = EarlyEnd(session) if throw_on_early_termination else None
    modules[0]._join_hook = early_end
    try:
        with uneven_inputs(synchronizers, divide_by_initial_world_size, early_end, timeout):
            yield
    finally:
        modules[0]._join_hook = None
