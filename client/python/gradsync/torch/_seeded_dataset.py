"""A dataset whose samples are the same, whichever process reads them, and in whichever order."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.torch._seeds import seed_generators


class SeededDataset(torch.utils.data.Dataset[Any]):
    """Seeds every generator before each sample of another dataset.

    So the random changes of a sample follow from seed, rank, epoch and index alone: they are the
    same in every loader worker, also if no earlier sample was read.

    Args:
      dataset: with `__getitem__` and `__len__`.
      seed: of the training.
      rank: of this process.
    """

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._rank = rank
        # Workers that live for several epochs see the new one.
        epoch: Any = torch.zeros((), dtype=torch.int64)  # the next call has no types
        self._epoch: torch.Tensor = epoch.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The samples that are read from now on belong to `epoch`."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch.fill_(epoch)

    def __getitem__(self, index: Any) -> Any:
        """The sample; its random changes follow from the index."""
        seed_generators(self._seed, self._rank, int(self._epoch), "sample", index)
        return self._dataset[index]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._dataset)
