"""Machines with round costs."""

from simulate.model import Model, Tensor
from simulate.profile import KEYS, Profile, Value


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
