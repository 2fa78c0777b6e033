"""What the processes of one training have to know: a file in the folder that they share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Optional

from faults import Fault

# A training has whole epochs.
STEPS_OF_EPOCH = 4

_FILE = "settings.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
      seed: of the model, its data and its random numbers.
      ranks: how many.
      steps: how many, a multiple of STEPS_OF_EPOCH.
      state_mib: size of the state that a replacement gets, in MiB, about.
      hold: whether losses are held; False: an ordinary training.
      broken: name of the part that is broken on purpose (see breaks.py); None: nothing.
      faults: who dies where.
      gradsyncctl: path of the program, for asking the daemon.
    """

    seed: int
    ranks: int
    steps: int
    state_mib: float
    hold: bool
    broken: Optional[str]
    faults: tuple[Fault, ...]
    gradsyncctl: str

    def write(self, folder: pathlib.Path) -> None:
        """Into the folder."""
        fields = dataclasses.asdict(self)
        (folder / _FILE).write_text(json.dumps(fields, indent=1))

    @classmethod
    def read(cls, folder: pathlib.Path) -> Settings:
        """The opposite of write()."""
        fields = json.loads((folder / _FILE).read_text())
        fields["faults"] = tuple(Fault.of_json(fault) for fault in fields["faults"])
        return cls(**fields)
