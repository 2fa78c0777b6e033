"""The trainer under test: one rank, through the public interface of gradsync.torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import gradsync.torch
import torch

# The first step of an optimizer imports it: a second for each rank, if not before the fork.
import torch._dynamo  # noqa: F401
from breaks import Break
from chain import ChainWriter, Link
from coded_gradients import CodedGradients
from places import Places
from settings import STEPS_OF_EPOCH, Settings

_ACCUMULATE = 2
_BATCHES = 8  # of one epoch
_BATCH = 4
assert _BATCHES == STEPS_OF_EPOCH * _ACCUMULATE
_FEATURES = 16
_CLASSES = 5
_WIDTH = 32
# The scheduler's steps, not the training's: a shorter training then has the same beginning.
_SCHEDULED_STEPS = 1000
# Parameter, and two averages of Adam, each of float32.
_STATE_BYTES_PER_ELEMENT = 12
_MIB = 1 << 20


class Model(torch.nn.Module):
    """A small network with random numbers and buffers, and a large parameter beside it."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, _WIDTH),
            torch.nn.BatchNorm1d(_WIDTH),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(_WIDTH, _CLASSES),
        )
        # The last parameter, and the last term of the loss: its gradient is ready first.
        self.code = torch.nn.Parameter(torch.zeros(elements))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the classes, and the parameter beside."""
        # As an output of the module, also where nothing is computed with it.
        return self.network(inputs), self.code * 1.0


class NoisySamples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of one rank, each time with other noise."""

    def __init__(self, seed: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        count = _BATCHES * _BATCH
        self._inputs = torch.randn(count, _FEATURES, generator=generator)
        self._classes = torch.randint(_CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index] + 0.1 * torch.randn(_FEATURES), self._classes[index]


class WatchedTraining(gradsync.torch.Training):
    """Notes where it is, and when."""

    def __init__(self, broken: Break, *args: Any, **more: Any) -> None:
        self.at = (0, 0)
        self.at_time = 0.0
        self._broken = broken
        super().__init__(*args, **more)

    def position(self, epoch: int, batch: int) -> None:
        """As there."""
        self.at, self.at_time = (epoch, batch), time.monotonic()
        with self._broken.seeding():
            super().position(epoch, batch)


def train(folder: pathlib.Path) -> None:
    """Runs the rank that the environment names, in the training of that folder."""
    with contextlib.ExitStack() as ends:
        _train(folder, ends)


def _train(folder: pathlib.Path, ends: contextlib.ExitStack) -> None:
    settings = Settings.read(folder)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    places = Places(rank, settings, folder)
    joined = time.monotonic()
    policy = {"on_rank_loss": "hold"} if settings.hold else {}
    broken = Break(settings.broken, folder, rank, settings.ranks)
    broken.wrap()  # beneath the places
    places.wrap()
    session = gradsync.torch.init(**policy)
    # Half of the scripts close what they have opened, also when an exception passes: that must not
    # count as leaving. For the others the end of the process does it.
    careful = rank % 2 == 0
    if careful:
        ends.enter_context(session)

    torch.manual_seed(settings.seed)
    elements = int(settings.state_mib * _MIB) // _STATE_BYTES_PER_ELEMENT
    module = Model(elements)
    model = gradsync.torch.DistributedDataParallel(
        module, bucket_cap_mb=0.002, first_bucket_cap_mb=0.002, last_bucket_cap_mb=0.002
    )
    if careful:
        ends.callback(model.leave)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=_SCHEDULED_STEPS
    )
    broken.watch(module, optimizer)
    places.guard(module.code.data_ptr(), module.code.nbytes)
    training = WatchedTraining(
        broken,
        model,
        optimizer,
        scheduler=scheduler,
        seed=settings.seed,
        accumulate=_ACCUMULATE,
    )
    samples = NoisySamples(settings.seed, rank)
    loader = torch.utils.data.DataLoader(samples, batch_size=_BATCH, shuffle=True)
    coded = CodedGradients(elements, settings.ranks, rank, _ACCUMULATE)
    chain = ChainWriter(folder, rank)

    own = hashlib.sha256()
    turn = 0
    first = True
    optimizer.zero_grad(set_to_none=True)
    for inputs, classes in _batches(training, loader, settings.steps):
        step = training.at[0] * _BATCHES + training.at[1]
        with training.accumulating():
            scores, code = model(inputs)
            loss = torch.nn.functional.cross_entropy(scores, classes) / _ACCUMULATE
            (loss + coded.loss(code, step, turn)).backward()
        own.update(inputs.numpy())
        own.update(loss.detach().numpy())
        turn += 1
        if not training.ends_window:
            continue
        if first and session.is_replacement:
            beside = time.monotonic() - joined - (places.ended_at - training.at_time)
            places.say(
                step=places.step,
                beside_ms=1e3 * beside,
                transfer_ms=1e3 * places.transfer_s,
            )
        first = False
        wrong = coded.wrong(module.code.grad, step)
        if wrong is not None:
            places.say(step=places.step, wrong=wrong)
        averages = _hash(parameter.grad for parameter in module.parameters())
        optimizer.step()
        scheduler.step()
        broken.after_step(places.step)
        own.update(torch.get_rng_state().numpy())
        own.update(repr(random.getstate()).encode())
        state = _hash_state(module, optimizer, scheduler)
        at = ".".join(map(str, training.at))
        chain.add(
            Link(
                rank,
                session.incarnation,
                os.getpid(),
                places.step,
                at,
                averages,
                own.hexdigest(),
                state,
            )
        )
        optimizer.zero_grad(set_to_none=True)
        own = hashlib.sha256()
        turn = 0
    places.say(void=session.statistics().steps_void, complete=session.statistics().steps_complete)
    end = _hash_state(module, optimizer, scheduler)
    chain.add(
        Link(rank, session.incarnation, os.getpid(), settings.steps + 1, "end", "end", "end", end)
    )
    if not careful:
        model.leave()


def _batches(training: WatchedTraining, loader: Any, steps: int) -> Iterator[Any]:
    """The batches of so many steps: whole epochs."""
    for _ in training.epochs(steps // STEPS_OF_EPOCH):
        yield from training.batches(loader)


def _hash(tensors: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(b"none" if tensor is None else tensor.detach().contiguous().numpy())
    return digest.hexdigest()


def _hash_state(module: torch.nn.Module, optimizer: Any, scheduler: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(json.dumps(value, default=repr).encode())

    add(module.state_dict())
    add(optimizer.state_dict())
    add({k: v for k, v in scheduler.state_dict().items() if not callable(v)})
    return digest.hexdigest()


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]))
