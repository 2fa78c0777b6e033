"""torch.distributed.init_process_group("gradsync"): every failure says what happened, at once."""

import contextlib
import datetime
import logging
import os
import re
import signal
import time
import types
import warnings

import gradsync
import pytest
import torch
import torch.distributed as dist
from daemon_process import DaemonProcess
from ranks import Ranks, run_ranks
from torch import nn

# A failure shows within this many seconds, far less than a time-out.
SOON_S = 20


def joined():
    import gradsync.torch  # noqa: F401  # makes "gradsync" known

    torch.set_num_threads(1)
    dist.init_process_group("gradsync")
    return dist.get_rank()


def failure_of(call):
    """Kind, reason, rank and text of what `call` raises."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - start < SOON_S, error
        return (
            type(error).__name__,
            getattr(error, "reason", ""),
            getattr(error, "rank", None),
            str(error),
        )
    return None


def all_reduce(count, op=dist.ReduceOp.SUM, dtype=torch.float32):
    dist.all_reduce(torch.ones(count).to(dtype), op=op)


def reduce_scatter(count, op=dist.ReduceOp.SUM):
    """So many elements for each rank; of two ranks the daemon takes 4 MiB in all and more."""
    whole = torch.ones(count * dist.get_world_size())
    dist.reduce_scatter_tensor(torch.empty(count), whole, op=op)


def all_gather(count):
    """Gathers so many elements in all; the daemon gathers 8 MiB and more."""
    size = dist.get_world_size()
    part = torch.ones(count // size)
    dist.all_gather_into_tensor(torch.empty(count // size * size), part)


MISMATCHES = {
    "sizes": (lambda: all_reduce(4), lambda: all_reduce(8), ("of 4 float32", "of 8 float32")),
    "types": (
        lambda: all_reduce(4),
        lambda: all_reduce(4, dtype=torch.float64),
        ("4 float32", "4 float64"),
    ),
    "ops": (lambda: all_reduce(4), lambda: all_reduce(4, dist.ReduceOp.MAX), ("(sum)", "(max)")),
    "kinds": (
        lambda: all_reduce(4),
        lambda: dist.broadcast(torch.ones(4), 0),
        ("all_reduce of 4", "broadcast of 4 float32, root 0"),
    ),
    "roots": (
        lambda: dist.broadcast(torch.ones(4), 0),
        lambda: dist.broadcast(torch.ones(4), 1),
        ("root 0", "root 1"),
    ),
    "barrier": (dist.barrier, lambda: all_reduce(1), ("barrier", "all_reduce of 1")),
    "parts": (
        lambda: reduce_scatter(1 << 20),
        lambda: all_gather(3 << 20),
        ("reduce_scatter_single of 1048576 float32 (sum)", "all_gather_single of 1572864 float32"),
    ),
    "ops of parts": (
        lambda: reduce_scatter(1 << 20),
        lambda: reduce_scatter(1 << 20, dist.ReduceOp.MIN),
        ("reduce_scatter_single of 1048576 float32 (sum)", "of 1048576 float32 (min)"),
    ),
}


def _call_another(name, warm_up):
    rank = joined()
    for _ in range(warm_up):
        all_reduce(4)
        all_reduce(8)
    failure = failure_of(MISMATCHES[name][rank])
    # The order is lost, so nothing else works.
    return failure, failure_of(dist.barrier)


@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatched_calls_are_named_on_every_rank(daemon, name, warm_up):
    for failures in run_ranks(_call_another, 2, name, warm_up):
        for kind, reason, _, text in failures:
            assert (kind, reason) == ("FailedPreconditionError", "OPERATION_MISMATCH"), text
            assert "rank 0 called " in text and "rank 1 called " in text, text
            for part in MISMATCHES[name][2]:
                assert part in text, text


def _leave_one_out():
    rank = joined()
    all_reduce(4)
    return failure_of((lambda: all_reduce(5)) if rank == 1 else dist.barrier)


def test_a_call_that_one_rank_leaves_out_is_named(daemon):
    """Rank 1 waits in its all-reduce when rank 0 comes to the barrier."""
    for failure in run_ranks(_leave_one_out, 2):
        assert failure[1] == "OPERATION_MISMATCH", failure


def _poll_a_mismatch():
    """Rank 0 polls a collective that Gloo carries out, while rank 1 calls another one."""
    rank = joined()
    if rank == 1:
        return failure_of(dist.barrier)
    warnings.simplefilter("error")  # PyTorch's of old methods
    work = dist.broadcast(torch.ones(4), 1, async_op=True)
    deadline = time.monotonic() + SOON_S
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert not work.is_success()
    assert work.exception().reason == gradsync.Reason.OPERATION_MISMATCH
    return failure_of(work.wait)


def test_a_poll_sees_that_the_group_has_failed(daemon):
    for failure in run_ranks(_poll_a_mismatch, 2):
        assert failure[1] == "OPERATION_MISMATCH", failure


def _poll_a_result():
    rank = joined()
    warnings.simplefilter("error")
    tensor = torch.full((4,), float(rank))
    work = dist.broadcast(tensor, 1, async_op=True)
    deadline = time.monotonic() + SOON_S
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.is_success() and work.exception() is None
    result = tensor.tolist()
    dist.barrier()
    return result


def test_a_poll_sees_the_result(daemon):
    assert run_ranks(_poll_a_result, 2) == [[1.0] * 4] * 2


COLLECTIVES = {
    "all_reduce": lambda: all_reduce(4),
    "large": lambda: all_reduce(3_000_000),
    "integers": lambda: all_reduce(4, dtype=torch.int64),
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(torch.ones(4), 1),
    "all_gather": lambda: dist.all_gather([torch.ones(4)] * 3, torch.ones(4)),
    "maximum": lambda: all_reduce(4, dist.ReduceOp.MAX),
    "reduce_scatter_tensor": lambda: reduce_scatter(4),
    "all_gather_into_tensor": lambda: all_gather(3 << 20),
}


def _lose_rank_1(name):
    rank = joined()

    def calls(count):
        for _ in range(count):
            COLLECTIVES[name]()

    if rank == 1:
        calls(3)
        os.kill(os.getpid(), signal.SIGKILL)
    # If a collective goes through Gloo, a rank may learn late that it was complete.
    return failure_of(lambda: calls(4))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_lost_rank_is_named(daemon, name):
    for kind, reason, rank, text in Ranks(_lose_rank_1, 3, name).results([0, 2]):
        assert (kind, reason, rank) == ("AbortedError", "RANK_LOST", 1), text


def _lose_rank_1_in_backward():
    rank = joined()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))

    def step():
        model(torch.ones(2, 6)).sum().backward()

    for _ in range(4):
        step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of(step), failure_of(step)


def _lose_rank_1_between_passes_of_the_hook():
    import gradsync.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
    model.register_comm_hook(None, gradsync.torch.allreduce_hook)

    def step():
        model(torch.ones(2, 6)).sum().backward()

    for _ in range(4):
        step()
    session = gradsync.torch.default_session()
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(gradsync.Error):
        session.barrier()
    assert session.ended
    return failure_of(step)


def test_a_rank_lost_between_passes_of_the_hook_is_named(daemon):
    """The hook does not begin anew before a pass has raised the loss."""
    [(kind, reason, rank, text)] = Ranks(_lose_rank_1_between_passes_of_the_hook, 2).results([0])
    assert (kind, reason, rank) == ("AbortedError", "RANK_LOST", 1), text


def test_a_rank_lost_in_ddps_backward_pass_is_named(daemon):
    ((first, second),) = Ranks(_lose_rank_1_in_backward, 2).results([0])
    # PyTorch makes a RuntimeError of what a future raises, and keeps the text.
    assert "RANK_LOST" in first[3] and "rank 1" in first[3]
    assert second[:3] == ("AbortedError", "RANK_LOST", 1)


def _lose_the_daemon(name, pid):
    rank = joined()
    for _ in range(3):
        COLLECTIVES[name]()
    if rank == 0:
        COLLECTIVES[name]()  # the others are in their last line: they end it, or fail in it
        os.kill(pid, signal.SIGKILL)
    return failure_of(lambda: [COLLECTIVES[name]() for _ in range(100)])


@pytest.mark.parametrize("name", ["all_reduce", "large", "barrier"])
def test_a_lost_daemon_is_named(own_daemon, name):
    for kind, reason, _, text in run_ranks(_lose_the_daemon, 2, name, own_daemon.pid):
        # In doubt: this rank had ended its part of the collective.
        assert kind == "UnavailableError" and reason in ("DAEMON_LOST", "STEP_IN_DOUBT"), text


def _no_daemon():
    import gradsync.torch  # noqa: F401

    def init():
        dist.init_process_group("gradsync", timeout=datetime.timedelta(seconds=10))

    return failure_of(init)


def test_a_missing_daemon_is_named_when_the_group_is_made():
    process = DaemonProcess()
    process.close()
    variables = {"GRADSYNC_SOCKET": process.socket}
    for kind, reason, _, text in run_ranks(_no_daemon, 2, environment=variables):
        assert (kind, reason) == ("UnavailableError", "DAEMON_LOST"), text
        assert process.socket in text


def _begin_again():
    rank = joined()
    all_reduce(4)
    first = failure_of(lambda: all_reduce(4 + rank))
    dist.destroy_process_group()
    joined()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return first[1], tensor.tolist()


def test_after_a_failure_a_new_group_works(daemon):
    assert run_ranks(_begin_again, 2) == [("OPERATION_MISMATCH", [2.0] * 4)] * 2


def _end_without_destroying():
    rank = joined()
    all_reduce(4)
    if rank == 1:
        import atexit

        # multiprocessing's children skip the functions of atexit.
        atexit._run_exitfuncs()
        return None
    time_out = time.monotonic() + SOON_S
    while (failure := failure_of(lambda: all_reduce(4))) is None:
        assert time.monotonic() < time_out
    return failure


def test_a_rank_that_ends_without_destroying_its_group_is_named(daemon):
    kind, reason, rank, text = run_ranks(_end_without_destroying, 2)[0]
    assert (kind, reason, rank) == ("AbortedError", "RANK_FINISHED", 1), text


def _wait_too_long():
    rank = joined()
    all_reduce(4)
    store = dist.distributed_c10d._get_default_store()
    failure = None
    if rank == 1:
        store.wait(["waited"])
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        failure = failure_of(lambda: work.wait(datetime.timedelta(seconds=0.2)))
        assert not work.is_completed()
        store.set("waited", b"")
    assert work.wait() and work.is_success()
    assert tensor.tolist() == [2.0] * 4
    return failure


def test_a_wait_that_times_out_can_be_repeated(daemon):
    first, _ = run_ranks(_wait_too_long, 2)
    assert first[:2] == ("DeadlineExceededError", "WAIT_TIMEOUT"), first


def _all_reduce_many_sizes():
    rank = joined()
    sums = []
    for size in range(1, 9):
        for _ in range(3):
            tensor = torch.full((size,), rank + 1.0)
            dist.all_reduce(tensor)
            sums.append(float(tensor.sum()) / size)
    dist.destroy_process_group()
    return sums


def test_a_quota_of_the_daemon_only_costs_time(monkeypatch):
    process = DaemonProcess("--quota_layouts_per_session=2")
    monkeypatch.setenv("GRADSYNC_SOCKET", process.socket)
    try:
        assert run_ranks(_all_reduce_many_sizes, 2) == [[3.0] * 24] * 2
    finally:
        process.close()


# What rank 0 says while it waits for rank 1. On a busy machine each rank may say more.
_LATE_NOTICES = [
    r"gradsync: rank 0 still waits for the process group after (?:[5-9]|[12]\d)s: "
    r'rank 1 has not called init_process_group\("gradsync"\)',
    r"gradsync: rank 0 still waits for a collective after \S+s: "
    r"rank 1 has not begun collective 2 \(broadcast of 4 float32, root 1\)",
    r"gradsync: rank 0 still waits for operation 1 \(all-reduce \(sum\) of .*\) after \S+s: "
    r"rank 1 has not called it",
]


class _OnNotice(logging.Handler):
    """Sets a key of a store after each of _LATE_NOTICES, and keeps their numbers."""

    def __init__(self, store):
        super().__init__()
        self.said = []
        self._store = store

    def emit(self, record):
        for number, notice in enumerate(_LATE_NOTICES):
            if re.fullmatch(notice, record.getMessage()):
                self.said.append(number)
                self._store.set(f"said {number}", "")


def _come_late(folder):
    """Rank 1 does each thing when rank 0 has named it."""
    import gradsync.torch  # noqa: F401  # makes "gradsync" known

    # In a store of PyTorch's default kind rank 0 would wait before it comes to gradsync.
    where = {"init_method": f"file://{folder}/group", "rank": int(os.environ["RANK"])}
    said = dist.FileStore(f"{folder}/said")
    handler = _OnNotice(said)
    logging.getLogger("gradsync").addHandler(handler)
    if where["rank"] == 1:
        said.wait(["said 0"])
    dist.init_process_group("gradsync", world_size=2, **where)
    dist.barrier()
    if where["rank"] == 1:
        said.wait(["said 1"])
    tensor = torch.ones(4) * where["rank"]
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1] * 4
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    if where["rank"] == 1:
        said.wait(["said 2"])
    model(torch.ones(1, 2)).sum().backward()  # the wait is in C++
    dist.destroy_process_group()
    return sorted(set(handler.said))


def test_ranks_that_come_late_are_named(daemon, tmp_path):
    assert run_ranks(_come_late, 2, str(tmp_path)) == [[0, 1, 2], []]


def _options(rank, size, ranks=()):
    """What PyTorch tells a backend of a new group."""
    return types.SimpleNamespace(
        group_rank=rank,
        group_size=size,
        global_ranks_in_group=list(ranks),
        timeout=datetime.timedelta(seconds=0.1),
    )


LATE = {
    "one": (_options(0, 2), 'rank 1 has not called init_process_group("gradsync") within 0.1 s'),
    "many": (_options(3, 12), "ranks 0, 1, 2, 4, 5, 6, 7, 8 and more have not called"),
    "new_group": (_options(0, 3, [2, 4, 7]), "ranks 4, 7 have not called new_group with the same"),
}


@pytest.mark.parametrize("name", LATE)
def test_ranks_that_never_come_are_named(name, capfd):
    from gradsync.torch.process_group._meeting import meet

    options, text = LATE[name]
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with pytest.raises(gradsync.DeadlineExceededError, match=re.escape(text)) as error:
        meet(options, store)
    assert error.value.reason == gradsync.Reason.OPERATION_TIMEOUT
    assert capfd.readouterr().err == ""  # PyTorch warns of waits of the store
