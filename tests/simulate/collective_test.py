"""Rings: latency, bandwidth, bytes, the choice of a protocol."""

import math

import pytest
from simulate.collective import Protocol, Ring, ring_all_reduce

SIMPLE = Protocol(base=1e-6, hop_within=2e-6, hop_between=10e-6)


def ring(within=100e9, between=5e9, link=10e9, protocols=(SIMPLE,)):
    return Ring(protocols, within, between, link)


def test_one_rank_takes_no_time_and_sends_nothing():
    cost = ring_all_reduce(1e6, [1], ring())
    assert (cost.seconds, cost.link_bytes, cost.total_bytes) == (0, 0, 0)


def test_a_node_alone_uses_no_link():
    cost = ring_all_reduce(8e6, [4], ring())
    assert cost.latency == pytest.approx(1e-6 + 6 * 2e-6)
    assert cost.transfer == pytest.approx(2 * 3 / 4 * 8e6 / 100e9)
    assert cost.link_bytes == 0
    assert cost.total_bytes == pytest.approx(2 * 3 * 8e6)


def test_two_nodes_wait_for_the_link():
    cost = ring_all_reduce(8e6, [4, 4], ring())
    assert cost.latency == pytest.approx(1e-6 + 4 * 10e-6 + 10 * 2e-6)
    assert cost.transfer == pytest.approx(2 * 7 / 8 * 8e6 / 5e9)
    assert cost.link_bytes == pytest.approx(2 * 7 / 8 * 8e6)
    assert cost.total_bytes == pytest.approx(2 * 7 * 8e6)


def test_one_rank_per_node_is_the_textbook_formula():
    cost = ring_all_reduce(1e6, [1] * 5, ring())
    assert cost.seconds == pytest.approx(1e-6 + 2 * 4 * 10e-6 + 2 * 4 / 5 * 1e6 / 5e9)


def test_the_slowest_hop_sets_the_rate():
    slow_link = ring_all_reduce(1e6, [2, 2], ring(link=1e9))
    slow_node = ring_all_reduce(1e6, [2, 2], ring(within=1e9))
    assert slow_link.transfer == slow_node.transfer == pytest.approx(2 * 3 / 4 * 1e6 / 1e9)


def test_second_rank_per_node_costs_what_was_measured():
    # 1.45 at 1 Gbit/s with Gloo, 25 MiB; an exchange of one rank per node is 1.
    link = ring(link=0.12e9)
    one = ring_all_reduce(25e6, [1, 1], link).seconds
    assert ring_all_reduce(25e6, [2, 2], link).seconds / one == pytest.approx(1.45, rel=0.05)


def test_small_messages_take_the_protocol_of_low_latency():
    low = Protocol(base=0.5e-6, hop_within=0.1e-6, hop_between=1e-6, share=0.25)
    both = ring(protocols=(SIMPLE, low))
    small, large = (ring_all_reduce(size, [4, 4], both) for size in (1e3, 1e8))
    assert small.latency == pytest.approx(0.5e-6 + 4 * 1e-6 + 10 * 0.1e-6)
    assert large.latency == pytest.approx(1e-6 + 4 * 10e-6 + 10 * 2e-6)
    # And so bandwidth saturates with the size.
    rates = [size / ring_all_reduce(size, [4, 4], both).seconds for size in (1e3, 1e5, 1e7, 1e9)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(5e9 / (2 * 7 / 8), rel=0.01)


def test_a_network_without_cost_takes_no_time():
    free = Ring((Protocol(0, 0, 0),), math.inf, math.inf, math.inf)
    assert ring_all_reduce(1e9, [8] * 32, free).seconds == 0
