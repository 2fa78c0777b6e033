"""Wrapping a module: every rank does it together."""

from __future__ import annotations

from typing import Collection, Sequence

import torch

import gradsync
from gradsync.torch import (
    _autograd,
    _checks,
    _history,
    _hold,
    _live,
    _optimizer_steps,
    _session,
)
from gradsync.torch._arguments import Options
from gradsync.torch._buckets import Buckets
from gradsync.torch._buffer_bucket import BufferBucket, nbytes_of
from gradsync.torch._extra_states import ExtraStates
from gradsync.torch._gradients import Slot
from gradsync.torch._hand_off import hand_off_of
from gradsync.torch._positions import Positions
from gradsync.torch._state import ModuleState
from gradsync.torch._synchronizer import Synchronizer


def wrap(
    module: torch.nn.Module,
    ignored: Collection[str],
    options: Options,
    session: gradsync.Session | None,
    name: str | None,
) -> Synchronizer:
    """Takes part with `module` in a job; every rank calls this, in the same order.

    Args:
      module: it must have passed check_module().
      ignored: names of parameters and buffers that stay out.
      options: the same on every rank.
      session: None: the process's own.
      name: of the layout; None: chosen.

    Raises: as DistributedDataParallel.
    """
    slots = [
        Slot(parameter_name, parameter, _autograd.accumulate_node(parameter))
        for parameter_name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter_name not in ignored
    ]
    hand_off = hand_off_of(slots[0].parameter.device)
    replaced = _live.claim(module, slots, session, name)
    if session is None:
        session = _session.default_session()
    held = _hold.is_held(session)
    if held:
        _hold.check_wrapping(session, module, ignored, options.sync_buffers, options.device_verdict)
    if options.device_verdict:
        buffers = [
            n for n, _ in module.named_buffers() if options.sync_buffers and n not in ignored
        ]
        _checks.check_device_verdict(slots[0].parameter.device, buffers)
    if name is None:
        name = _session.unique_name(session, "ddp")
    state = ModuleState(module, ignored, session, name)
    trained = None
    if session.is_replacement:
        slots = _hold.current_order(session, name, slots)
    else:
        trained = _agree(state, slots, options, session)
    buffer_bytes = nbytes_of(list(state.buffers().values())) if held else 0
    old = None if replaced is None else replaced()
    buckets = Buckets(
        session,
        name,
        slots,
        options.caps,
        hand_off,
        options.timeout,
        None if old is None else old.buckets,
        buffer_bytes=buffer_bytes,
    )
    if old is not None:
        _live.replace(old)
    synchronizer = Synchronizer(
        state,
        buckets,
        broadcast_buffers=options.sync_buffers,
        static_graph=options.static_graph,
        device_verdict=options.device_verdict,
        trained_before=trained is not None,
        positions=(
            Positions(session, buckets.slots, state.buffers, ExtraStates(module)) if held else None
        ),
        buffer_bucket=BufferBucket(buffer_bytes) if buffer_bytes else None,
    )
    if held:
        _hold.remember_wrapping(session)
    _history.remember(module, synchronizer.outcomes.verdicts.times)
    _live.add(synchronizer)
    _optimizer_steps.watch()
    return synchronizer


def _agree(
    state: ModuleState, slots: Sequence[Slot], options: Options, session: gradsync.Session
) -> int | None:
    """Gives every rank the same module; returns the rank that has trained it, or None."""
    with _session.noting(session):
        trained = _history.root_of(session, state.module, options.wrap_timeout)
    if options.init_sync:
        state.agree(
            options.lines(),
            {slot.name for slot in slots},
            0 if trained is None else trained,
            options.wrap_timeout,
            buffers=options.init_sync_buffers,
        )
    return trained
