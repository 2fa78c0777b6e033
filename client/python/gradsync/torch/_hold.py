"""What a module needs so that lost ranks of its job can be replaced (on_rank_loss="hold")."""

from __future__ import annotations

import weakref
from typing import Collection, Sequence

import torch

import gradsync
from gradsync.torch._extra_states import ExtraStates
from gradsync.torch._gradients import DATA_TYPES, Slot

# Sessions with a wrapped module.
_wrapped: weakref.WeakSet[gradsync.Session] = weakref.WeakSet()


def is_held(session: gradsync.Session) -> bool:
    """Whether lost ranks of the job are replaced."""
    return session.options.on_rank_loss == "hold"


def refusal(session: gradsync.Session, what: str, instead: str) -> gradsync.UnimplementedError:
    """The error for `what`, which does not work where lost ranks are replaced."""
    return gradsync.UnimplementedError(
        f"rank {session.rank}: with on_rank_loss='hold' {what}; {instead}",
        reason=gradsync.Reason.LOSS_POLICY,
    )


def check_wrapping(
    session: gradsync.Session,
    module: torch.nn.Module,
    ignored: Collection[str],
    sync_buffers: bool,
    device_verdict: bool,
) -> None:
    """Checks that a replacement could get all that `module` has.

    Raises:
      UnimplementedError: LOSS_POLICY: it could not; says why and what to do.
    """
    if session.options.state_source != "survivor":
        raise refusal(
            session,
            "modules need state_source='survivor', which brings their state to a replacement",
            "leave out state_source",
        )
    if session in _wrapped:
        raise refusal(
            session,
            "a session has one wrapped module, and this one has one already",
            "wrap one module that holds both, once",
        )
    check_no_process_group(session)
    if device_verdict:
        raise refusal(
            session,
            "the host must know each step's verdict, and device_verdict leaves it on the GPU",
            "leave out device_verdict",
        )
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise refusal(
                session,
                f"gradients must be in host memory, and parameter '{name}' is on "
                f"{parameter.device}",
                "use on_rank_loss='abort'",
            )
        if name in ignored:
            raise refusal(
                session,
                f"every parameter must be the same on every rank, and '{name}' is in "
                "_ddp_params_and_buffers_to_ignore",
                "remove it there",
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise refusal(
                session,
                f"no optimizer can run in the backward pass, as that of parameter '{name}' does",
                "call optimizer.step() after it",
            )
    for name, buffer in module.named_buffers():
        if not sync_buffers or name in ignored:
            raise refusal(
                session,
                f"buffers must be the same on every rank, and '{name}' is not synchronized",
                "leave out broadcast_buffers=False, forward_sync_buffers=False and "
                "_ddp_params_and_buffers_to_ignore",
            )
        if buffer.device.type != "cpu":
            raise refusal(
                session,
                f"buffers must be in host memory, and '{name}' is on {buffer.device}",
                "move it there",
            )
    why_not = ExtraStates(module).why_not()
    if why_not is not None:
        raise refusal(
            session,
            f"the extra state of every module must travel to a replacement, and one cannot: "
            f"{why_not.removeprefix('gradsync: ')}",
            "let get_extra_state() return only such values, and write a set_extra_state()",
        )


def check_no_process_group(session: gradsync.Session) -> None:
    """Checks that this process has no process group of PyTorch.

    Raises:
      UnimplementedError: LOSS_POLICY: it has one.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise refusal(
            session,
            "a process group cannot be used, because a replacement could not join it",
            "leave out init_process_group, or use on_rank_loss='abort'",
        )


def remember_wrapping(session: gradsync.Session) -> None:
    """The session has a wrapped module now."""
    _wrapped.add(session)


def current_order(session: gradsync.Session, name: str, slots: Sequence[Slot]) -> list[Slot]:
    """`slots` in the order that the job's layout has now; for a replacement.

    Raises:
      FailedPreconditionError: LAYOUT_MISMATCH: the job has no such layout, or its parameters are
        not those of this module; names the first difference.
    """
    layouts = {layout.name: layout for layout in session.current_layouts()}
    if name not in layouts:
        raise _mismatch(session, f"has no layout '{name}', only {', '.join(layouts) or 'none'}")
    by_name = {slot.name: slot for slot in slots}
    order = []
    for parameter in layouts[name].parameters:
        slot = by_name.pop(parameter.name, None)
        theirs = f"parameter '{parameter.name}' of shape {list(parameter.shape)}"
        if slot is None:
            raise _mismatch(session, f"has {theirs}, and this module does not")
        shape = tuple(slot.parameter.size())
        if shape != tuple(parameter.shape) or DATA_TYPES[slot.parameter.dtype] != parameter.dtype:
            raise _mismatch(
                session,
                f"has {theirs}, {parameter.dtype.name.lower()}, but here it is {list(shape)}, "
                f"{slot.parameter.dtype}",
            )
        order.append(slot)
    if by_name:
        raise _mismatch(session, f"has no parameter '{next(iter(by_name))}', and this module does")
    return order


def _mismatch(session: gradsync.Session, what: str) -> gradsync.FailedPreconditionError:
    return gradsync.FailedPreconditionError(
        f"rank {session.rank} replaces a lost one, but the job {what}. Start it with the same "
        "script and model as the other ranks",
        reason=gradsync.Reason.LAYOUT_MISMATCH,
    )
