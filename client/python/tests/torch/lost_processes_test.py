"""Trainers and daemons that are killed or missing: an error on every rank, and no hang."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from bad_input import SLACK, Trapped
from models import SMALL_BUCKETS
from ranks import Ranks, run_ranks
from torch import nn


def trained_once(wrapper_options):
    """This rank's session, module, wrapper and data; every rank has taken one step."""
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(step_timeout=20.0)
    module = Trapped()
    model = gradsync.torch.DistributedDataParallel(module, **wrapper_options)
    data = torch.ones(4, 6)
    model(data).sum().backward()
    session.barrier()
    return session, module, model, data


def train_until_killed(victim, wrapper_options):
    """Returns (code, reason, rank, seconds since the kill, whether gradients are dropped, more)."""
    import gradsync

    session, module, model, data = trained_once(wrapper_options)
    if session.rank == victim:
        module.action = lambda: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(data).sum().backward()
    except gradsync.Error as error:
        took = time.monotonic() - start
        no_gradients = all(p.grad is None for p in model.parameters())
        ends = []
        # Every later pass raises the same error at once.
        with contextlib.suppress(AttributeError):
            try:
                model(data).sum().backward()
            except gradsync.Error as again:
                ends.append(again.code)
        return error.code, error.reason, error.rank, took, no_gradients, ends
    return None


@pytest.mark.parametrize("options", [SMALL_BUCKETS, {}], ids=["buckets", "one-bucket"])
def test_a_trainer_killed_in_backward_is_named_to_the_others(daemon, options):
    ends = Ranks(train_until_killed, 3, 1, options).results(ranks=[0, 2])
    for code, reason, rank, took, no_gradients, again in ends:
        assert (code, reason, rank) == ("ABORTED", "RANK_LOST", 1)
        assert took < SLACK and no_gradients and again == ["ABORTED"]


def kill_in_the_others_pass(model, pid):
    # The average of a bucket needs the other rank, which may still be in the barrier.
    layout = model._synchronizer.buckets.layout
    layout.wait_bucket(layout.next_step, 0)
    os.kill(pid, signal.SIGKILL)


def train_until_the_daemon_dies(pid):
    import gradsync

    session, module, model, data = trained_once(SMALL_BUCKETS)
    if session.rank == 1:
        module.action = lambda: kill_in_the_others_pass(model, pid)
    start = time.monotonic()
    try:
        model.zero_grad(set_to_none=True)
        model(data).sum().backward()
    except gradsync.Error as error:
        no_gradients = all(p.grad is None for p in model.parameters())
        return error.code, error.reason, time.monotonic() - start, no_gradients
    return None


def test_a_daemon_killed_in_backward_is_an_error(own_daemon):
    for end in run_ranks(train_until_the_daemon_dies, 2, own_daemon.pid):
        code, reason, took, no_gradients = end
        assert code == "UNAVAILABLE" and reason in ("DAEMON_LOST", "STEP_IN_DOUBT")
        assert took < SLACK and no_gradients


def init_without_variables():
    import gradsync.torch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with pytest.raises(gradsync.InvalidArgumentError) as raised:
        gradsync.torch.init()
    session = gradsync.torch.init(rank=0, world_size=1, job_id=f"given-{os.getpid()}")
    return str(raised.value), session.rank, session.world_size


def test_init_names_a_missing_rank_and_needs_no_variable_if_all_is_given(daemon):
    ((message, rank, world_size),) = run_ranks(init_without_variables, 1)
    assert "RANK is not set" in message and "torchrun --nproc_per_node=" in message
    assert (rank, world_size) == (0, 1)


def wrap_without_a_daemon():
    import gradsync.torch

    with pytest.raises(gradsync.UnavailableError) as raised:
        gradsync.torch.init(connect_timeout=0.1)
    return str(raised.value)


def test_a_missing_daemon_is_named_by_its_socket():
    nowhere = f"/tmp/gradsync-nowhere-{os.getpid()}.sock"  # a socket's path must be short
    (text,) = run_ranks(wrap_without_a_daemon, 1, environment={"GRADSYNC_SOCKET": nowhere})
    assert nowhere in text


def wrap_without_torchrun():
    import gradsync.torch

    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(gradsync.InvalidArgumentError) as raised:
        gradsync.torch.DistributedDataParallel(nn.Linear(2, 2))
    return str(raised.value)


def test_a_missing_launcher_is_named_by_its_variable(daemon):
    (text,) = run_ranks(wrap_without_torchrun, 1)
    assert "RANK" in text or "WORLD_SIZE" in text


def run_script(script):
    """The exit status and the errors of a script in a process of its own."""
    end = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    return end.returncode, end.stderr


def end_by_an_exception():
    """A training script that fails: it prints a traceback, and the interpreter ends."""
    script = (
        "import gradsync.torch, torch\n"
        "model = gradsync.torch.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "raise SystemError('mine')\n"
    )
    if os.environ["RANK"] == "1":
        return run_script(script)
    import gradsync.torch

    model = gradsync.torch.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(gradsync.AbortedError) as raised:
        model(torch.ones(1, 2)).sum().backward()
    return raised.value.reason, raised.value.rank


def test_a_script_that_fails_is_a_loss(daemon):
    (reason, rank), (code, text) = run_ranks(end_by_an_exception, 2)
    assert (reason, rank) == ("RANK_LOST", 1)
    assert code == 1 and "SystemError: mine" in text


def end_by_a_good_end():
    # On a busy machine one rank may wait for the other, and say so.
    script = (
        "import gradsync.torch, logging, torch\n"
        "logging.getLogger('gradsync').setLevel(logging.ERROR)\n"
        "model = gradsync.torch.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    return run_script(script)


def test_a_script_that_ends_leaves_the_job(daemon):
    assert run_ranks(end_by_a_good_end, 2) == [(0, "")] * 2
