"""The event core: order, time, queues."""

import pytest
from simulate.simulator import Resource, Signal, Simulator


def test_events_run_in_the_order_of_their_times():
    simulator, seen = Simulator(), []
    for delay in (3, 1, 2):
        simulator.after(delay, lambda delay=delay: seen.append((simulator.now, delay)))
    simulator.run()
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_events_of_the_same_time_run_in_the_order_of_the_calls():
    simulator, seen = Simulator(), []
    for name in "abc":
        simulator.after(1, lambda name=name: seen.append(name))
    simulator.run()
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("delay", [-1, float("nan")])
def test_negative_delay_is_refused(delay):
    with pytest.raises(ValueError):
        Simulator().after(delay, lambda: None)


def test_a_process_lets_time_pass_and_waits_for_signals():
    simulator, seen = Simulator(), []
    signal = Signal()

    def waiting():
        yield signal
        seen.append(simulator.now)
        yield 2
        seen.append(simulator.now)
        yield signal  # which has fired: goes on at once
        seen.append(simulator.now)

    simulator.start(waiting())
    simulator.after(5, signal.fire)
    simulator.run()
    assert seen == [5, 7, 7]


def test_a_signal_wakes_all_in_their_order():
    simulator, seen = Simulator(), []
    signal = Signal()

    def waiting(name):
        yield signal
        seen.append(name)

    for name in "abc":
        simulator.start(waiting(name))
    simulator.after(1, signal.fire)
    simulator.run()
    assert seen == ["a", "b", "c"]


def test_a_resource_serves_one_after_the_other():
    simulator, seen = Simulator(), []
    resource = Resource()

    def user(name, arrives, seconds):
        yield arrives
        yield from resource.use(seconds)
        seen.append((name, simulator.now))

    simulator.start(user("a", 0, 5))
    simulator.start(user("b", 1, 1))
    simulator.start(user("c", 2, 1))
    simulator.start(user("d", 20, 3))
    simulator.run()
    assert seen == [("a", 5), ("b", 6), ("c", 7), ("d", 23)]
