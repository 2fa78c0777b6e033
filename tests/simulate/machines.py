"""Machines with round costs, and closed forms to compare the simulation with."""

import math

from simulate.collective import ring_all_reduce
from simulate.model import Model, Tensor
from simulate.profile import KEYS, Profile, Value

MIB = 1 << 20


def machine(**costs):
    """A profile; `nccl_launch=5` is nccl.launch, in the unit of KEYS; `compute_step` of "toy"."""
    values = {}
    for name, value in {"node_ranks": 2, "compute_step": 30, **costs}.items():
        key = name.replace("_", ".", 1)
        if key.startswith("nccl.low_"):
            key = key.replace("low_", "low.", 1)
        unit = KEYS[key.replace("compute.", "compute.*.")]
        values[key.replace("compute.", "compute.toy.")] = Value(value, unit, "a test")
    return Profile("test", "for a test", values)


def toy(tensors=4, elements=1 << 18):
    """A model of equal tensors of 1 MiB whose layers take equal times."""
    return Model("toy", tuple(Tensor(f"t{i}", (elements,), 1.0) for i in range(tensors)))


DAEMON = {
    "gradsync_hand_off": 10,
    "gradsync_empty": 60,
    "gradsync_wake": 20,
    "gradsync_reduce": 50,
    "gradsync_launch": 40,
    "gradsync_between": 1,
    "gradsync_hop_between": 50,
    "gradsync_commit": 60,
    "gradsync_peer": 100,
}
LIBRARY = {
    "nccl_launch": 5,
    "nccl_hop_within": 1,
    "nccl_hop_between": 10,
    "nccl_within": 100,
    "nccl_between": 2,
}


def uniform(parameters):
    """A model of that many float32 parameters; only their number is known."""
    tensors = max(1, round(parameters / MIB))
    return Model(
        "uniform", tuple(Tensor(f"t{i}", (parameters // tensors,)) for i in range(tensors))
    )


def all_reduce_seconds(profile, backend, nbytes, ranks_of_node):
    """From the last rank's call until it has the result, while nothing else runs."""
    ring = profile.ring(backend)
    if backend != "gradsync":
        return ring_all_reduce(nbytes, ranks_of_node, ring).seconds
    ranks = max(ranks_of_node)

    def reduce(traffic):
        if not traffic:
            return 0.0
        return profile.get("gradsync.wake") + traffic / profile.get("gradsync.reduce")

    seconds = profile.get("gradsync.empty")
    if len(ranks_of_node) == 1:
        return seconds + reduce(2 * ranks * nbytes)
    # To the coordinator, its launch back, and the other nodes' messages that they are done.
    seconds += 1.5 * profile.get("gradsync.peer")
    exchange = ring_all_reduce(nbytes, [1] * len(ranks_of_node), ring).seconds
    if ranks == 1:
        return seconds + exchange
    chunk = min(nbytes, profile.get("gradsync.chunk", math.inf))
    beside = reduce(2 * (ranks + 1) * (nbytes - chunk))
    return seconds + 2 * reduce((ranks + 1) * chunk) + max(exchange, beside)
