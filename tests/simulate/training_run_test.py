"""Whole steps: closed forms, conservation, queues, jitter."""

import dataclasses

import machines
import pytest
from simulate.collective import ring_all_reduce
from simulate.model import Model, Tensor
from simulate.profile import Refused
from simulate.training_run import Setup, run

MIB = 1 << 20
# A step of machines.machine() computes for 30 ms.
FORWARD, BACKWARD = 10e-3, 20e-3


def library(**costs):
    return machines.machine(**{**machines.LIBRARY, **costs})


def daemon(**costs):
    return machines.machine(**{**machines.DAEMON, **costs})


def setup(profile, backend, ranks, **more):
    return Setup(machines.toy(), profile, backend, ranks, steps=2, **more)


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_bucket_is_the_sum_of_the_stages(ranks, overlap):
    profile = library(nccl_per_tensor=100)
    wanted = setup(profile, "nccl", ranks, overlap=overlap, first_bucket_cap=25 * MIB)
    result = run(wanted)
    cost = ring_all_reduce(4 * MIB, wanted.nodes(), profile.ring("nccl"))
    assert len(result.buckets) == 1
    assert result.step == pytest.approx(FORWARD + BACKWARD + 4 * 100e-6 + cost.seconds)


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_one_bucket_through_the_daemon_is_the_sum_of_the_stages(ranks, nodes):
    profile = daemon()
    wanted = setup(profile, "gradsync", ranks, overlap=False, first_bucket_cap=25 * MIB)
    synchronization = machines.all_reduce_seconds(profile, "gradsync", 4 * MIB, wanted.nodes())
    # Messages between daemons: before the launch, to the commit, and back.
    expected = FORWARD + BACKWARD + 10e-6 + synchronization + (50e-6 if nodes > 1 else 0)
    assert run(wanted).step == pytest.approx(expected)


@pytest.mark.parametrize("reduce", [0.5, 50])
def test_chunks_overlap_sum_exchange_and_write_back(reduce):
    profile = daemon().with_values({"gradsync.chunk": 1, "gradsync.reduce": reduce}, "a test")
    wanted = setup(profile, "gradsync", 4, overlap=False, first_bucket_cap=25 * MIB)
    synchronization = machines.all_reduce_seconds(profile, "gradsync", 4 * MIB, wanted.nodes())
    expected = FORWARD + BACKWARD + 10e-6 + synchronization + 50e-6
    result = run(wanted)
    assert result.step == pytest.approx(expected)
    assert result.reduced_bytes == pytest.approx(2 * 2 * 3 * 4 * MIB)


def test_without_overlap_all_buckets_add_up():
    profile = library()
    wanted = setup(profile, "nccl", 4, overlap=False, bucket_cap=MIB)
    result = run(wanted)
    assert result.buckets == (MIB,) * 4
    cost = ring_all_reduce(MIB, [2, 2], profile.ring("nccl")).seconds
    assert result.communication == pytest.approx(4 * cost)
    assert result.step == pytest.approx(FORWARD + BACKWARD + 4 * cost)


def test_with_overlap_only_the_last_bucket_is_exposed():
    # A bucket takes 0.8 ms, and backward 5 ms from one to the next.
    profile = library()
    cost = ring_all_reduce(MIB, [2, 2], profile.ring("nccl")).seconds
    step = run(setup(profile, "nccl", 4, bucket_cap=MIB)).step
    assert step == pytest.approx(FORWARD + BACKWARD + cost)


def test_when_the_network_is_slow_buckets_queue_behind_the_first():
    profile = library(nccl_between=0.05)
    cost = ring_all_reduce(MIB, [2, 2], profile.ring("nccl")).seconds
    assert cost > BACKWARD / 4
    step = run(setup(profile, "nccl", 4, bucket_cap=MIB)).step
    assert step == pytest.approx(FORWARD + BACKWARD / 4 + 4 * cost)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_network_without_cost_leaves_the_computation(overlap):
    nothing = {name: 0 for name in machines.LIBRARY if "hop" in name or "launch" in name}
    profile = library(**nothing, nccl_within=1e12, nccl_between=1e12)
    result = run(setup(profile, "nccl", 8, overlap=overlap))
    assert result.step == pytest.approx(result.compute)


@pytest.mark.parametrize("backend", ["nccl", "gradsync"])
@pytest.mark.parametrize("between", [0.01, 0.1, 1, 10])
def test_overlap_lies_between_its_bounds(backend, between):
    profile = machines.machine(**{**machines.LIBRARY, **machines.DAEMON})
    profile = profile.with_values({f"{backend}.between": between}, "a test")
    wanted = setup(profile, backend, 8, bucket_cap=MIB)
    with_, without = run(wanted), run(dataclasses.replace(wanted, overlap=False))
    assert with_.step <= without.step
    assert with_.step >= max(with_.compute, with_.communication)


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("bucket_cap", [0, MIB, 25 * MIB])
def test_no_byte_is_lost_or_sent_twice(ranks, bucket_cap):
    profile = machines.machine(**{**machines.LIBRARY, **machines.DAEMON})
    size = 4 * MIB
    nodes = ranks // 2
    ring = run(setup(profile, "nccl", ranks, bucket_cap=bucket_cap))
    assert sum(ring.buckets) == size
    assert ring.total_bytes == pytest.approx(2 * (ranks - 1) * size)
    assert ring.link_bytes == pytest.approx(2 * (ranks - 1) / ranks * size if nodes > 1 else 0)
    ours = run(setup(profile, "gradsync", ranks, bucket_cap=bucket_cap))
    # One exchange per node, and memory is read and written once, or twice around the exchange.
    assert ours.link_bytes == pytest.approx(2 * (nodes - 1) / nodes * size)
    assert ours.total_bytes == pytest.approx(2 * (nodes - 1) * size)
    passes = 2 * 2 if nodes == 1 else nodes * 2 * (2 + 1)
    assert ours.reduced_bytes == pytest.approx(passes * size)


def test_skipping_synchronization_shares_its_cost_among_the_steps():
    profile = library(nccl_between=0.2)
    every = [
        run(dataclasses.replace(setup(profile, "nccl", 4, sync_every=n), steps=8))
        for n in (1, 2, 4, 8)
    ]
    added = every[0].step - every[0].compute
    for result, n in zip(every, (1, 2, 4, 8)):
        assert result.step - result.compute == pytest.approx(added / n)
        assert result.link_bytes == pytest.approx(every[0].link_bytes)


def test_lanes_hide_latency_but_share_the_link():
    slow_start = library(nccl_launch=4000, nccl_between=1)
    step = {n: run(setup(slow_start, "nccl", 4, lanes=n, bucket_cap=0)).step for n in (1, 2, 4)}
    assert step[2] < step[1]
    slow_link = library(nccl_launch=0, nccl_between=0.02, nccl_hop_between=0, nccl_hop_within=0)
    step = {n: run(setup(slow_link, "nccl", 4, lanes=n, bucket_cap=0)).step for n in (1, 4)}
    assert step[4] == pytest.approx(step[1])


def test_same_seed_gives_same_jitter():
    profile = library(straggler_sigma=0.05)
    first, again, other = (run(setup(profile, "nccl", 4, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.step != other.step


def test_more_ranks_wait_for_the_slowest_of_more():
    nothing = {name: 0 for name in machines.LIBRARY if "hop" in name or "launch" in name}
    profile = library(**nothing, nccl_within=1e12, nccl_between=1e12, straggler_sigma=0.05)
    steps = [
        run(dataclasses.replace(setup(profile, "nccl", ranks), steps=20)).step
        for ranks in (2, 16, 128)
    ]
    assert steps == sorted(steps)
    assert steps[0] > 30e-3


def test_reduce_threads_take_cores_from_trainers():
    alone = daemon(gradsync_reduce=1, gradsync_wake=0)
    shared = daemon(gradsync_reduce=1, gradsync_wake=0, node_steal=1)
    wanted = setup(alone, "gradsync", 2, bucket_cap=MIB)
    # Each bucket is read and written twice: 4.2 ms, and three of four fall into backward.
    stolen = 3 * 4 * MIB / 1e9
    assert run(wanted).step < 40e-3
    step = run(dataclasses.replace(wanted, profile=shared)).step
    assert step == pytest.approx(run(wanted).step + stolen, rel=0.02)
    # Without overlap no rank computes meanwhile.
    without = dataclasses.replace(wanted, overlap=False)
    assert run(dataclasses.replace(without, profile=shared)) == run(without)


def test_a_bucket_waits_for_those_with_lower_numbers():
    # The first bucket is the large one. It is ready after 16 of 20 ms of backward; the small ones
    # are ready before it has travelled.
    model = Model(
        "toy", (Tensor("a", (9,), 1.0), Tensor("b", (9,), 1.0), Tensor("c", (1 << 20,), 8.0))
    )
    profile = library(nccl_between=0.5)
    large, small = (
        ring_all_reduce(size, [2, 2], profile.ring("nccl")).seconds for size in (4 * MIB, 36)
    )
    result = run(Setup(model, profile, "nccl", 4, bucket_cap=0, steps=1))
    assert result.step == pytest.approx(FORWARD + 0.8 * BACKWARD + large + 2 * small)


def test_the_last_node_may_be_half_full():
    profile = library()
    assert setup(profile, "nccl", 5).nodes() == [2, 2, 1]
    assert setup(profile, "nccl", 5, ranks_of_node=4).nodes() == [4, 1]
    assert run(setup(profile, "nccl", 5)).total_bytes == pytest.approx(2 * 4 * 4 * MIB)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "gloo"},
        {"ranks": 0},
        {"lanes": 0},
        {"steps": 3, "sync_every": 2},
        {"model": Model("unknown", machines.toy().tensors)},
    ],
)
def test_invalid_setup_is_refused(changes):
    with pytest.raises(Refused):
        run(dataclasses.replace(setup(library(), "nccl", 2), **changes))
