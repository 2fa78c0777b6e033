"""Passes through a data loader that are the same in every process, from any batch on."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Iterator

import torch

from gradsync.torch import _seeds
from gradsync.torch._seeded_dataset import SeededDataset

_KNOWN_SAMPLERS = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)


class LoaderPasses:
    """Begins an epoch's pass through a loader so that a replacement gets the same batches.

    Used on the thread that trains.

    Args:
      seed: of the training.
      rank: of this process.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = seed
        self._rank = rank
        # Generators that the user has given to loaders and samplers, with the users' seeds.
        self._generators: list[tuple[torch.Generator, int]] = []

    def begin(self, loader: Any, epoch: int, skip: int) -> Iterator[tuple[int, Any]]:
        """Yields (index, batch) of one epoch, without the first `skip` batches.

        Args:
          loader: a `DataLoader`, or anything that can be iterated once for each epoch.
          epoch: its samplers and datasets get it by `set_epoch`, if they have that.
          skip: batches that are done. A loader of a SeededDataset with one of PyTorch's samplers
            does not read them; any other one does, because later batches can depend on it.

        Raises:
          ValueError: the loader's batches cannot be repeated; says why.
        """
        if isinstance(loader, torch.utils.data.DataLoader):
            _check(loader)
        for sampler in _samplers(loader):
            if getattr(sampler, "generator", self) is None:
                # Otherwise it would draw its order from PyTorch's generator, at any time.
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(_seeds.number(self._seed, self._rank, "order"))
        for part in _parts(loader):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(_seeds.number(self._first_seed(generator), epoch))
        first = 0
        if skip and _can_skip(loader):
            loader, first = _without(loader, skip), skip
        _seeds.seed_generators(self._seed, self._rank, epoch, "order")
        batches = iter(loader)
        for index in itertools.count(first):
            # The loader's samples in this process must not depend on earlier computation.
            _seeds.seed_generators(self._seed, self._rank, epoch, "batch", index)
            try:
                batch = next(batches)
            except StopIteration:
                return
            if index >= skip:
                yield index, batch

    def _first_seed(self, generator: torch.Generator) -> int:
        for known, seed in self._generators:
            if known is generator:
                return seed
        seed = generator.initial_seed()
        self._generators.append((generator, seed))
        return seed


class _Skipping:
    """A sampler without its first batches."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skip, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skip)


def _samplers(loader: Any) -> list[Any]:
    """What chooses the loader's samples, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "sampler", None),
    ]
    found = [sampler for sampler in samplers if sampler is not None]
    return [part for i, part in enumerate(found) if all(part is not p for p in found[:i])]


def _parts(loader: Any) -> list[Any]:
    """The loader, its dataset and its samplers."""
    return [loader, getattr(loader, "dataset", None), *_samplers(loader)]


def _can_skip(loader: Any) -> bool:
    """Whether each batch is the same even if earlier ones were not read."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return False
    sampler = loader.batch_sampler
    return (
        isinstance(loader.dataset, SeededDataset)
        and type(sampler) is torch.utils.data.BatchSampler
        # Another one may draw its order from any generator, at any time.
        and type(sampler.sampler) in _KNOWN_SAMPLERS
    )


def _without(loader: Any, skip: int) -> Any:
    """A copy of a loader that does not read its first batches."""
    other = copy.copy(loader)
    # The loader refuses to set these attributes.
    other.__dict__["batch_sampler"] = _Skipping(loader.batch_sampler, skip)
    other.__dict__["_iterator"] = None
    return other


def _check(loader: Any) -> None:
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "gradsync: the loader has in_order=False, so its batches come in another order each "
            "time; leave that out"
        )
    if loader.persistent_workers and not isinstance(loader.dataset, SeededDataset):
        raise ValueError(
            "gradsync: the loader's workers live for several epochs, and a replacement's would not "
            "have read the earlier ones; give the loader training.seeded(dataset), or leave out "
            "persistent_workers"
        )
