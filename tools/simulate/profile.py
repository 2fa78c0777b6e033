"""The costs of a machine, each with its unit and its source.

A profile is an INI file, such as those in profiles/. Its section `costs` has a line for each key,
`KEY = VALUE UNIT; SOURCE`; `text` in section `about` describes the machine.
"""

from __future__ import annotations

import configparser
import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Optional

from .collective import Protocol, Ring

PROFILES = pathlib.Path(__file__).resolve().parent / "profiles"
BACKENDS = ("gradsync", "nccl", "gloo")

# Factors to seconds, bytes and bytes per second.
_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "GB/s": 1e9,
    "Gbit/s": 1e9 / 8,
    "MiB": 1 << 20,
    "fraction": 1.0,
    "ranks": 1.0,
}

# The keys of a profile and their units.
KEYS = {
    "node.ranks": "ranks",
    "node.steal": "fraction",
    "straggler.sigma": "fraction",
    "link.rate": "Gbit/s",
    "link.efficiency": "fraction",
    "compute.*.step": "ms",
    "compute.*.optimizer": "ms",
    # Libraries whose ring goes through every rank.
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
    # The daemon and its engine between nodes.
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
    """A profile or a request is invalid; the text says why."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One cost.

    Attributes:
      value: in `unit`.
      unit: as in KEYS.
      source: a document and its place, or the measurement.
    """

    value: float
    unit: str
    source: str

    @property
    def si(self) -> float:
        """The value in seconds, bytes, bytes per second, or without a unit."""
        return self.value * _UNITS[self.unit]


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds of a step without synchronization: all of it, and the optimizer's part."""

    step: float
    optimizer: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """All costs of a machine.

    Attributes:
      name: as --profile says it.
      about: one sentence.
      values: by key.
    """

    name: str
    about: str
    values: Mapping[str, Value]

    def get(self, key: str, default: Optional[float] = None) -> float:
        """The cost in seconds, bytes per second, or without a unit.

        Raises:
          Refused: the profile lacks it, and there is no default.
        """
        if key in self.values:
            return self.values[key].si
        if default is None:
            raise Refused(f"profile {self.name} does not say {key}")
        return default

    def with_values(self, changes: Mapping[str, float], source: str) -> Profile:
        """The same machine with other costs, given in the units of KEYS."""
        values = dict(self.values)
        for key, value in changes.items():
            values[key] = Value(value, _unit_of(key), source)
        return dataclasses.replace(self, values=values)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends whose costs the profile has."""
        return tuple(
            backend
            for backend in BACKENDS
            if any(key.startswith(f"{backend}.") for key in self.values)
        )

    def compute(self, model: str) -> Compute:
        """How long a model computes on this machine; Refused if the profile does not say it."""
        if f"compute.{model}.step" not in self.values:
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
        """The ring of one of `backends`; Refused if it is none of them."""
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


def names() -> list[str]:
    """The profiles that come with the program."""
    return sorted(path.stem for path in PROFILES.glob("*.ini"))


def load(name: str) -> Profile:
    """Args: name: one of names(), or the path of a file.

    Raises:
      Refused: no such profile, or it has an unknown key, another unit, or a cost without a source.
    """
    path = PROFILES / f"{name}.ini" if name in names() else pathlib.Path(name)
    if not path.is_file():
        raise Refused(f"no profile {name}: there are {', '.join(names())}, or give a file")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        about, costs = parser["about"]["text"], parser["costs"]
        values = {key: _parse(key, text) for key, text in costs.items()}
    except (OSError, ValueError, KeyError, configparser.Error) as error:
        raise Refused(f"{path} is no profile: {error!r}") from error
    return Profile(path.stem, about, values)


def _parse(key: str, text: str) -> Value:
    cost, _, source = text.partition(";")
    number, _, unit = cost.strip().partition(" ")
    if unit != _unit_of(key):
        raise Refused(f"{key} is in {_unit_of(key)}, not in {unit}")
    if not source.strip():
        raise Refused(f"{key} has no source")
    value = float(number)
    if not (math.isfinite(value) and value >= 0):
        raise Refused(f"{key} is {value}")
    return Value(value, unit, source.strip())


def _unit_of(key: str) -> str:
    parts = key.split(".")
    pattern = ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "compute" else key
    if pattern not in KEYS:
        raise Refused(f"{key} is no key of a profile")
    return KEYS[pattern]
