"""Forked children, such as DataLoader's workers, cannot use their parent's session."""

import gc
import multiprocessing
import os
import subprocess
import sys
import traceback

import gradsync
import pytest
from ranks import run_ranks
from threads import finish_step, job


def in_child(body):
    """The exit code of a forked child that runs `body`."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            gc.collect()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_calls_fail_in_a_child_and_the_parent_continues(daemon):
    with job(daemon, 2, [10]) as (sessions, layouts):
        values = layouts[0].bucket(0).numpy()
        # From now on there are helper threads. The child does not have them.
        with pytest.raises(gradsync.DeadlineExceededError):
            layouts[0].wait_step(1, 0.3)

        def child():
            calls = (
                sessions[0].barrier,
                sessions[0].leave,
                sessions[0].leave_and_stay,
                lambda: sessions[0].all_reduce(values),
                lambda: sessions[0].register_layout(explicit_buckets=[gradsync.Bucket(1)]),
                lambda: gradsync.Session.join(sessions[0].options),
                lambda: layouts[0].mark_ready(1, 0),
                lambda: layouts[0].end_step(1),
                lambda: layouts[0].finish_step(1),
                lambda: layouts[0].wait_step(1),
                lambda: layouts[0].wait_step(1, 0),
                lambda: layouts[0].wait_bucket(1, 0),
            )
            for call in calls:
                with pytest.raises(gradsync.FailedPreconditionError) as raised:
                    call()
                assert raised.value.reason == gradsync.Reason.FORKED
            assert sessions[0].rank == 0 and layouts[0].bucket_count == 1
            values[0] += 1  # the mapping is shared, and still there
            layouts[0].close()
            sessions[0].close()
            assert sessions[0].closed

        assert in_child(child) == 0
        assert values[0] == 1
        assert finish_step(layouts, 1).step == 1


def test_a_childs_copies_go_out_of_scope(daemon):
    with job(daemon, 2, [10]) as (sessions, layouts):
        everything = {"sessions": sessions, "layouts": layouts, "view": layouts[0].bucket(0)}
        sessions, layouts = list(sessions), list(layouts)

        def child():
            everything.clear()
            del sessions[:], layouts[:]

        assert in_child(child) == 0
        assert finish_step(everything["layouts"], 1).step == 1


EXIT = """
import os, sys, gradsync
options = gradsync.SessionOptions(socket=sys.argv[1], job_id="exit")
with gradsync.Session.join(options) as session:
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(100)])
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    layout.mark_ready(1, 0)
    layout.end_step(1)
    print(layout.wait_step(1).step)
"""


def test_a_childs_interpreter_exits(daemon):
    run = subprocess.run(
        [sys.executable, "-c", EXIT, daemon.socket],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "1\n", "")


def work(inbox, outbox):
    for number in iter(inbox.get, None):
        outbox.put(2 * number)


def train_with_workers(steps):
    """Like a DataLoader: two forked workers run during the training, and then end by themselves."""
    session = gradsync.Session.join()
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(4)])
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=work, args=(inbox, outbox)) for _ in range(2)]
    for worker in workers:
        worker.start()
    seen = 0
    for step in range(1, steps + 1):
        inbox.put(step)
        layout.bucket(0).numpy()[:] = outbox.get()
        layout.mark_ready(step, 0)
        layout.end_step(step)
        layout.wait_step(step)
        seen += float(layout.bucket(0).numpy()[0])
        if step == steps // 2:
            inbox.put(None)  # one worker ends, and with it its copy of the session
    inbox.put(None)
    for worker in workers:
        worker.join()
    session.leave()
    session.close()
    return seen, [worker.exitcode for worker in workers]


def test_forked_workers_do_not_disturb_training(daemon):
    assert run_ranks(train_with_workers, 2, 10) == [(110.0, [0, 0])] * 2


def join_in_child():
    # This process has not joined a job, so its child can.
    pid = os.fork()
    if pid == 0:
        with gradsync.Session.join() as session:
            session.barrier()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_of_a_process_that_never_joined_can_join(daemon):
    assert run_ranks(join_in_child, 2) == [0, 0]
