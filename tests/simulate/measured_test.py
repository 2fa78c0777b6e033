"""Predictions against measurements on the machine of docs/benchmarks.md, 2026-11-21.

Two nodes are network namespaces joined by a link of 1 Gbit/s; other programs used a quarter to
three quarters of the machine meanwhile. gradsync.empty, wake and reduce of profile `this-machine`
come from 64 KiB and 100 MiB of 2 ranks, gloo.within from Gloo's rows of one node. All other rows
are predictions.
"""

import statistics

import machines
import pytest
from simulate.profile import Compute, load
from simulate.training_run import Setup, run

KIB, MIB = 1 << 10, 1 << 20
# The share of payload in a shaper of namespaces, which counts no preamble and no gap.
EFFICIENCY = 1448 / 1514

# Backend, ranks of each node, bytes, microseconds.
ONE_NODE = [
    ("gradsync", [2], 64 * KIB, 93),
    ("gradsync", [2], MIB, 146),
    ("gradsync", [2], 25 * MIB, 1680),
    ("gradsync", [2], 100 * MIB, 6450),
    ("gradsync", [4], 25 * MIB, 3070),
    ("gradsync", [4], 100 * MIB, 12600),
    ("gloo", [2], 25 * MIB, 17300),
    ("gloo", [2], 100 * MIB, 69000),
]
TWO_NODES = [
    ("gloo", [1, 1], MIB, 8645),
    ("gloo", [1, 1], 4 * MIB, 35540),
    ("gloo", [1, 1], 25 * MIB, 220719),
    ("gloo", [2, 2], 4 * MIB, 50484),
    ("gloo", [2, 2], 25 * MIB, 320366),
    ("gradsync", [2, 2], 25 * MIB, 218072),
    ("gloo", [2, 2], 25 * MIB, 326635),
    ("gradsync", [2, 2], 100 * MIB, 878367),
    ("gloo", [2, 2], 100 * MIB, 1331200),
]
# Training steps: parameters, ranks of a node, a step without synchronization in ms, then the
# measured steps with each backend; gradsync as a wrapper and, where there are three, as a hook.
STEPS = [
    (25206794, 1, 74.4, [("gradsync", 921.1), ("gradsync", 923.5), ("gloo", 887.1)]),
    (25206794, 2, 194.6, [("gradsync", 971.1), ("gradsync", 1000.6), ("gloo", 1382.2)]),
    (25206794, 2, 1988.4, [("gradsync", 2269.5), ("gloo", 2377.7)]),
    (1582090, 2, 310.8, [("gradsync", 319.8), ("gradsync", 347.1), ("gloo", 332.6)]),
]


def two_nodes():
    """Both nodes share the memory of one machine."""
    profile = load("this-machine").with_values(
        {"link.rate": 1, "link.efficiency": EFFICIENCY}, "a test"
    )
    shared = profile.values["gradsync.reduce"].value / 2
    return profile.with_values({"gradsync.reduce": shared}, "a test")


def check(errors, largest, median):
    errors = [abs(error) for error in errors]
    assert max(errors) < largest
    assert statistics.median(errors) < median


@pytest.mark.parametrize(
    ("profile", "rows"), [(load("this-machine"), ONE_NODE), (two_nodes(), TWO_NODES)]
)
def test_all_reduces_take_as_long_as_measured(profile, rows):
    check(
        (
            machines.all_reduce_seconds(profile, backend, nbytes, nodes) * 1e6 / measured - 1
            for backend, nodes, nbytes, measured in rows
        ),
        largest=0.07,
        median=0.03,
    )


def test_training_steps_take_as_long_as_measured():
    profile = two_nodes()
    errors = []
    for parameters, ranks, alone, rows in STEPS:
        for backend, measured in rows:
            setup = Setup(
                machines.uniform(parameters),
                profile,
                backend,
                2 * ranks,
                compute=Compute(alone * 1e-3, 0.0),
                ranks_of_node=ranks,
            )
            errors.append(run(setup).step * 1e3 / measured - 1)
    check(errors, largest=0.10, median=0.06)


def test_daemon_sends_less_than_a_ring_through_all_ranks():
    # Four ranks on two nodes send S per node, a ring through all of them 1.5 S.
    profile = load("this-machine").with_values({"link.rate": 1}, "a test")
    ours = machines.all_reduce_seconds(profile, "gradsync", 100e6, [2, 2])
    ring = machines.all_reduce_seconds(profile, "gloo", 100e6, [2, 2])
    assert ring / ours == pytest.approx(1.5, rel=0.03)
