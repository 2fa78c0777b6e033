"""A machine's costs, read from profiles/*.json: each with its unit and where it comes from.

A profile is an object: `name`, `about`, and `values`, which maps a key of KEYS to an object of
`value`, `unit` and `source` (and `date`, where it was measured here).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Optional

from .collective import Protocol, Ring

PROFILES = pathlib.Path(__file__).resolve().parent / "profiles"
NETWORKS = pathlib.Path(__file__).resolve().parent / "networks"
BACKENDS = ("gradsync", "nccl", "gloo")

# In seconds, bytes, bytes per second, or plain.
_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "GB/s": 1e9,
    "Gbit/s": 1e9 / 8,
    "MiB": 1 << 20,
    "fraction": 1.0,
    "ranks": 1.0,
    "streams": 1.0,
}

# What a profile may say, and its unit.
KEYS = {
    "node.ranks": "ranks",
    "node.steal": "fraction",
    "straggler.sigma": "fraction",
    "link.rate": "Gbit/s",
    "link.efficiency": "fraction",
    "compute.*.step": "ms",
    "compute.*.optimizer": "ms",
    # Of a library whose ring goes through every rank.
    "nccl.launch": "us",
    "nccl.per_tensor": "us",
    "nccl.within": "GB/s",
    "nccl.between": "GB/s",
    "nccl.hop_within": "us",
    "nccl.hop_between": "us",
    "nccl.low.base": "us",
    "nccl.low.hop_within": "us",
    "nccl.low.hop_between": "us",
    "nccl.low.share": "fraction",
    "gloo.launch": "us",
    "gloo.per_tensor": "us",
    "gloo.within": "GB/s",
    "gloo.between": "GB/s",
    "gloo.hop_within": "us",
    "gloo.hop_between": "us",
    # The daemon and its engine.
    "gradsync.hand_off": "us",
    "gradsync.per_tensor": "us",
    "gradsync.empty": "us",
    "gradsync.wake": "us",
    "gradsync.reduce": "GB/s",
    "gradsync.launch": "us",
    "gradsync.between": "GB/s",
    "gradsync.hop_between": "us",
    "gradsync.commit": "us",
    "gradsync.peer": "us",
    "gradsync.chunk": "MiB",
}


class Refused(Exception):
    """A profile, a file or a wish that makes no sense; says why."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One cost.

    Attributes:
      value: in `unit`.
      unit: of KEYS.
      source: a document and its place, or the measurement.
    """

    value: float
    unit: str
    source: str

    @property
    def si(self) -> float:
        """In seconds, bytes per second, or plain."""
        return self.value * _UNITS[self.unit]


@dataclasses.dataclass(frozen=True)
class Compute:
    """A rank's seconds of a step that synchronizes nothing: forward, backward, optimizer."""

    step: float
    optimizer: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """All costs of a machine.

    Attributes:
      name: as --profile says it.
      about: in a sentence.
      values: by key.
    """

    name: str
    about: str
    values: Mapping[str, Value]

    def get(self, key: str, default: Optional[float] = None) -> float:
        """In seconds, bytes per second, or plain. Refused if it is needed and not there."""
        if key in self.values:
            return self.values[key].si
        if default is None:
            raise Refused(f"profile {self.name} does not say {key}")
        return default

    def on_network(self, network: Profile) -> Profile:
        """The same machines behind other links; of a backend that it does not know, nothing."""
        known = {
            key: value
            for key, value in network.values.items()
            if key.split(".")[0] not in BACKENDS or key.split(".")[0] in self.backends
        }
        return dataclasses.replace(
            self, name=f"{self.name} on {network.name}", values={**self.values, **known}
        )

    def with_values(self, changes: Mapping[str, float], source: str) -> Profile:
        """The same machine with other costs, given in the units of KEYS."""
        values = dict(self.values)
        for key, value in changes.items():
            values[key] = Value(value, _unit_of(key), source)
        return dataclasses.replace(self, values=values)

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that it knows the costs of."""
        return tuple(
            backend
            for backend in BACKENDS
            if any(key.startswith(f"{backend}.") for key in self.values)
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Those whose time on this machine it knows."""
        return tuple(
            key.split(".")[1]
            for key in self.values
            if key.startswith("compute.") and key.endswith(".step")
        )

    def compute(self, model: str) -> Compute:
        """Of a model of models()."""
        if model not in self.models:
            raise Refused(
                f"profile {self.name} does not say how long {model} computes: give --compute-ms"
            )
        return Compute(
            self.get(f"compute.{model}.step"), self.get(f"compute.{model}.optimizer", 0.0)
        )

    @property
    def link(self) -> float:
        """Bytes per second of payload that a node's link carries in each direction."""
        return self.get("link.rate", math.inf) * self.get("link.efficiency", 1.0)

    def ring(self, backend: str) -> Ring:
        """Of a backend of backends()."""
        if backend not in self.backends:
            raise Refused(f"profile {self.name} knows no {backend}: {', '.join(self.backends)}")
        protocols = [
            Protocol(
                self.get(f"{backend}.launch", 0.0),
                self.get(f"{backend}.hop_within", 0.0),
                self.get(f"{backend}.hop_between", 0.0),
            )
        ]
        if f"{backend}.low.share" in self.values:
            protocols.append(
                Protocol(
                    self.get(f"{backend}.low.base"),
                    self.get(f"{backend}.low.hop_within"),
                    self.get(f"{backend}.low.hop_between"),
                    self.get(f"{backend}.low.share"),
                )
            )
        return Ring(
            tuple(protocols),
            self.get(f"{backend}.within", math.inf),
            self.get(f"{backend}.between", math.inf),
            self.link,
        )


def names(folder: pathlib.Path = PROFILES) -> list[str]:
    """Of what comes with the program: of PROFILES or of NETWORKS."""
    return sorted(path.stem for path in folder.glob("*.json"))


def load(name: str, folder: pathlib.Path = PROFILES) -> Profile:
    """Args: name: one of names(), or the path of a file.

    Raises:
      Refused: there is none, or it says something unknown, in another unit, or without a source.
    """
    path = folder / f"{name}.json" if name in names(folder) else pathlib.Path(name)
    if not path.is_file():
        raise Refused(
            f"no {folder.name[:-1]} {name}: there are {', '.join(names(folder))}, or give a file"
        )
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} is no profile: {error!r}") from error


def _parse(content: dict[str, Any]) -> Profile:
    values = {}
    for key, entry in content["values"].items():
        unit = _unit_of(key)
        if entry["unit"] != unit:
            raise Refused(f"{key} is in {unit}, not in {entry['unit']}")
        if not str(entry["source"]).strip():
            raise Refused(f"{key} has no source")
        value = float(entry["value"])
        if not (math.isfinite(value) and value >= 0):
            raise Refused(f"{key} is {value}")
        values[key] = Value(value, unit, str(entry["source"]))
    return Profile(str(content["name"]), str(content["about"]), values)


def _unit_of(key: str) -> str:
    parts = key.split(".")
    pattern = ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "compute" else key
    if pattern not in KEYS:
        raise Refused(f"{key} is nothing that a profile says")
    return KEYS[pattern]
