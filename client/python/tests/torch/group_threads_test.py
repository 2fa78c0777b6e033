"""The threads of process groups: each group keeps its order, and no group has one of its own."""

import os
import threading

import pytest
from gradsync.torch.process_group import _threads
from gradsync.torch.process_group._lane import Lane

LONG_S = 60


class WatchedThreads(_threads.Threads):
    """Says when a thread has become idle."""

    def __init__(self):
        super().__init__()
        self.started = []
        self.idle = threading.Semaphore(0)

    def _serve(self, call):
        self.started.append(threading.current_thread())
        super()._serve(call)

    def _next(self, calls):
        self.idle.release()
        return super()._next(calls)


@pytest.fixture
def shared(monkeypatch):
    watched = WatchedThreads()
    monkeypatch.setattr(_threads, "threads", watched)
    return watched


def wait(event):
    assert event.wait(LONG_S)


def test_groups_that_work_one_after_the_other_share_a_thread(shared):
    for lane in [Lane() for _ in range(8)]:
        lane.put(lambda: None)
        assert shared.idle.acquire(timeout=LONG_S)
    assert len(shared.started) == 1


def test_groups_may_wait_for_each_other(shared):
    one, other = Lane(), Lane()
    begun, ended = threading.Event(), threading.Event()
    one.put(lambda: wait(begun))
    one.put(ended.set)
    other.put(begun.set)
    other.put(lambda: wait(ended))
    assert one.settle(LONG_S) and other.settle(LONG_S)
    assert len(shared.started) == 2


def test_calls_of_a_group_keep_their_order(shared):
    lane, order = Lane(), []
    for number in range(1000):
        lane.put(lambda number=number: order.append(number))
    assert lane.settle(LONG_S)
    assert order == list(range(1000))


def test_a_call_that_steps_aside_may_wait_for_the_next_one(shared):
    lane, order = Lane(), []
    next_ran, first_ended = threading.Event(), threading.Event()

    def first():
        lane.step_aside()
        lane.step_aside()  # the second time does nothing
        wait(next_ran)
        order.append("first")
        first_ended.set()

    def second():
        order.append("second")
        next_ran.set()

    lane.put(first)
    lane.put(second)
    wait(first_ended)
    assert order == ["second", "first"]
    assert lane.settle(LONG_S)


def test_a_lane_is_settled_when_its_last_call_has_ended(shared):
    lane = Lane()
    running, go_on = threading.Event(), threading.Event()

    def call():
        running.set()
        wait(go_on)

    lane.put(call)
    wait(running)
    assert lane.busy and not lane.settle(0.01)
    threading.Timer(0.2, go_on.set).start()
    assert lane.settle(LONG_S) and not lane.busy


def test_a_thread_without_work_ends(shared, monkeypatch):
    monkeypatch.setattr(_threads, "IDLE_S", 0.05)
    Lane().put(lambda: None)
    assert shared.idle.acquire(timeout=LONG_S)
    shared.started[0].join(LONG_S)
    assert not shared.started[0].is_alive()
    Lane().put(lambda: None)
    assert shared.idle.acquire(timeout=LONG_S)
    assert len(shared.started) == 2


def _refuse(_):
    raise RuntimeError("can't start new thread")


def test_a_call_without_a_thread_is_refused_and_later_ones_work(shared, monkeypatch):
    lane, order = Lane(), []
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            lane.put(lambda: order.append("refused"))
    assert not lane.busy
    lane.put(lambda: order.append("later"))
    assert lane.settle(LONG_S)
    assert order == ["later"]


def test_without_a_second_thread_the_first_one_goes_on_after_its_call(shared, monkeypatch):
    lane, order = Lane(), []
    queued = threading.Event()

    def first():
        wait(queued)
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", _refuse)
            lane.step_aside()
        order.append("first")

    lane.put(first)
    lane.put(lambda: order.append("second"))
    queued.set()
    assert lane.settle(LONG_S)
    assert order == ["first", "second"]
    assert len(shared.started) == 1


def test_a_forked_child_has_threads_of_its_own():
    lane = Lane()
    lane.put(lambda: None)
    assert lane.settle(LONG_S)
    child = os.fork()
    if child == 0:
        lane = Lane()
        lane.put(lambda: None)
        os._exit(0 if lane.settle(LONG_S) else 1)
    assert os.waitpid(child, 0)[1] == 0
