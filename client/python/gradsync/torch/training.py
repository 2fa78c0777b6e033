"""The loop of a training whose lost ranks are replaced."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, ContextManager, Iterator, Mapping, Sequence

import torch

import gradsync
from gradsync.torch import _hold, _seeds, _session, _state_image
from gradsync.torch._frozen_state import FrozenState
from gradsync.torch._loader_passes import LoaderPasses
from gradsync.torch._positions import Position
from gradsync.torch._seeded_dataset import SeededDataset
from gradsync.torch._shared_state import SharedState
from gradsync.torch.distributed import DistributedDataParallel


class Training:
    """Knows the whole state of a training, and where in its data this rank is.

        gradsync.torch.init(on_rank_loss="hold")
        training = gradsync.torch.Training(model, optimizer, scheduler=scheduler)
        for epoch in training.epochs(10):
            for images, digits in training.batches(loader):
                optimizer.zero_grad()
                loss(training.model(images), digits).backward()
                optimizer.step()
                scheduler.step()

    With `on_rank_loss="hold"`, a new process takes the place of a lost rank and runs the same
    script. Its Training gets the state of the model from another rank; `epochs` and `batches` leave
    out what is done. The other ranks only wait. docs/survive-a-lost-rank.md says what a run needs
    to have the same bits as one without a loss.

    With `on_rank_loss="abort"` it seeds and iterates in the same way, so that both runs can be
    compared.

    A lost rank can be replaced from the first complete step after the buckets were rebuilt,
    normally the second step. If a rank is lost earlier, the job ends.

    Not thread-safe; use it on the thread that trains. The session keeps it alive.

    Args:
      model: the wrapper; another module is wrapped.
      optimizer: of its parameters.
      scheduler: of the optimizer; None: there is none.
      scaler: a `torch.amp.GradScaler`; None: there is none.
      seed: of all random numbers, the same on every rank. Ranks get different numbers from it.
      accumulate: batches whose gradients are added before each step; see `accumulating`.
      extra: further objects with state_dict() and load_state_dict(), by name, whose state is the
        same on every rank: a second optimizer, an average of the parameters. A state has tensors in
        host memory, numbers, booleans, text and None, in mappings, lists and tuples.
      start: (epoch, batch) of the first batch that is not done, the same on every rank, for a
        training that goes on from a checkpoint. Load the checkpoint first.

    Attributes:
      model: the wrapper.

    Raises:
      TypeError: with "hold", a state has something that cannot travel; names it.
      ValueError: `accumulate` is not positive; or `start` is negative, or not at the beginning of a
        step.
      UnimplementedError: LOSS_POLICY: with "hold" the model cannot be wrapped, or has a Training
        already.
      gradsync.Error: in a replacement, as Session.fetch_state() and Session.confirm_state().
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        seed: int = 0,
        accumulate: int = 1,
        extra: Mapping[str, Any] | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"gradsync: accumulate must be positive, not {accumulate}")
        self._start = Position(*start)
        if min(start) < 0 or self._start.batch % accumulate != 0:
            raise ValueError(
                f"gradsync: start is {start}; give epoch and batch from 0, and a batch with which "
                f"a step begins: a multiple of accumulate, {accumulate}"
            )
        if not isinstance(model, DistributedDataParallel):
            model = DistributedDataParallel(model)
        self.model = model
        self._synchronizer = model._in_job()
        self._session = self._synchronizer.session
        self._seed = seed
        self._accumulate = accumulate
        self._shared = SharedState(
            self._synchronizer.module, optimizer, scheduler, scaler, extra or {}
        )
        self._passes = LoaderPasses(seed, self._session.rank)
        self._epoch: int | None = None  # that epochs() has yielded
        self._begun: int | None = None  # the last epoch of which batches() has begun
        self._ends_window = True
        if self._synchronizer.positions is not None:
            self._read()  # refuses early what cannot travel
            self._synchronizer.positions.attach(FrozenState(self._shared))
            self._session.serve_state(self._read)
            # While it finishes, this rank may have to give its state to a replacement.
            _session.finish_before_others_at_exit()
            if self._session.is_replacement:
                self._heal()

    # ---- Where this rank is

    @property
    def is_replacement(self) -> bool:
        """Whether this process has taken the place of a lost one.

        Skip what the ranks did together at their start, such as a barrier: they do not repeat it.
        """
        return self._session.is_replacement

    @property
    def start(self) -> tuple[int, int]:
        """(epoch, batch) at which this process begins, for loops without epochs() and batches().

        As given, except in a replacement: it begins where the other ranks are. If the training is
        over, both are beyond the last ones.
        """
        return self._start

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the epochs that are not done, of 0 to `number` - 1.

        A replacement begins within the epoch of the step that runs. It does not repeat what its
        rank did between two steps, nor what follows the last step of the last epoch: the state that
        it gets is that of a rank that has done it. So save what the training ends with after this
        loop, and not at the end of its last turn.
        """
        for epoch in range(self._start.epoch, number):
            self._epoch = epoch
            yield epoch
        self._epoch = None

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yields the batches of an epoch, and calls position() with the first one of each step.

        Batches that are done, before `start`, are left out. They are read, unless the loader's
        dataset is `seeded`. Generators are seeded before each batch is read. Samplers and datasets
        get the epoch by `set_epoch`, if they have that method. If you gave a generator to a sampler
        or loader, it is seeded from its first seed and the epoch.

        Args:
          loader: a `DataLoader`, or anything that can be iterated once for each epoch, with the
            same number of batches on every rank.

        Raises:
          RuntimeError: it is not called in epochs(), or a second time in one epoch.
          ValueError: the loader's batches cannot be repeated; says why.
        """
        epoch = self._epoch
        if epoch is None or epoch == self._begun:
            raise RuntimeError(
                "gradsync: call training.batches(loader) once in each turn of training.epochs(n); "
                "chain loaders that belong to one epoch, and iterate without it to evaluate"
            )
        self._begun = epoch
        skip = self._start.batch if epoch == self._start.epoch else 0
        batches = self._passes.begin(loader, epoch, skip)
        for index, batch, last in _with_last(batches, look_ahead=self._accumulate > 1):
            if index % self._accumulate == 0:
                self.position(epoch, index)
            self._ends_window = last or (index + 1) % self._accumulate == 0
            yield batch

    @property
    def ends_window(self) -> bool:
        """Whether the batch that batches() has yielded is the last one of its step."""
        return self._ends_window

    def accumulating(self) -> ContextManager[None]:
        """A context for forward and backward pass of one batch, if `accumulate` is more than 1.

            with training.accumulating():
                loss(training.model(images), digits).backward()
            if training.ends_window:
                optimizer.step()

        It is `model.no_sync()`, except for the last batch of a step.
        """
        return contextlib.nullcontext() if self._ends_window else self.model.no_sync()

    def position(self, epoch: int, batch: int) -> None:
        """Says where this rank is, and seeds all generators from that, the seed and the rank.

        batches() calls it. In a loop of your own, call it once for each step, after the step's
        first batch is read and before its first forward pass, with the same numbers on every rank.
        From then until the step's backward pass has ended, nothing may change parameters,
        optimizer, scheduler or scaler.

        Args:
          epoch: from 0.
          batch: of the epoch, from 0.

        Raises:
          TypeError: with "hold", a part of the state cannot travel to a replacement; names it.
          UnimplementedError: LOSS_POLICY: with "hold", there is a process group.
          gradsync.Error: the session has ended.
        """
        positions = self._synchronizer.positions
        if positions is not None:
            _hold.check_no_process_group(self._session)
            with _session.noting(self._session):
                self._synchronizer.buckets.layout.set_position(epoch, batch)
            positions.begin(Position(epoch, batch))
        _seeds.seed_generators(self._seed, self._session.rank, epoch, "step", batch)

    # ---- Data

    def seeded(self, dataset: Any) -> SeededDataset:
        """`dataset` with generators seeded before each sample, from seed, rank, epoch and index.

        So a replacement need not read the batches that are done, and loader workers may live for
        several epochs.

        Args:
          dataset: with `__getitem__` and `__len__`.
        """
        return SeededDataset(dataset, self._seed, self._session.rank)

    # ---- The state of the model

    def check_in_sync(self, timeout: float | None = None) -> None:
        """Checks that every rank has the same state of the model, between two steps.

        Every rank calls it. It hashes the whole state. A rank that is lost meanwhile ends the job.

        Args:
          timeout: seconds to wait for the other ranks; None: 30 min.

        Raises:
          TypeError: a part of the state is not in host memory, or of a type that no replacement can
            get; names it.
          FailedPreconditionError: RANKS_DIVERGED, on every rank: names the ranks and the first part
            that differs.
          gradsync.Error: a rank was lost or did not come.
        """
        with _session.noting(self._session):
            self._session.check_in_sync(self._read, timeout)

    def _read(self) -> Sequence[tuple[str, gradsync.StateMemory]]:
        """The items of the state. With "hold" it runs in a thread of the library, too."""
        synchronizer = self._synchronizer
        state = self._shared.read()
        if synchronizer.positions is not None:
            running = synchronizer.outcomes.step is not None
            state["place"] = synchronizer.positions.state(running)
            state["wrapper"] = synchronizer.first_steps.state()
        elif synchronizer.outcomes.broadcast_buffers:
            state["buffers"] = synchronizer.buffers()
        return _state_image.to_items(state)

    def _heal(self) -> None:
        """Gets the state of the model from a rank that lives."""
        with _session.noting(self._session):
            while True:
                try:
                    self._load(_state_image.from_items(self._session.fetch_state().items))
                    self._session.confirm_state()
                    return
                except gradsync.AbortedError as error:
                    # A step became void, or another rank was lost, too: fetch again.
                    if error.reason != gradsync.Reason.STATE_INTERRUPTED:
                        raise

    def _load(self, state: Mapping[str, Any]) -> None:
        positions = self._synchronizer.positions
        assert positions is not None
        if "place" not in state or "wrapper" not in state:
            raise _hold.refusal(
                self._session, "the other ranks have no Training", "run one script on every rank"
            )
        place, wrapper = state["place"], state["wrapper"]
        self._shared.load({k: v for k, v in state.items() if k not in ("place", "wrapper")})
        positions.restore(place)
        self._synchronizer.first_steps.restore(wrapper)
        if positions.is_over:
            # That rank has called leave() or ends: it has done all that its loop does.
            self._start = Position(sys.maxsize, sys.maxsize)
        else:
            self._start = positions.current or self._start


def _with_last(
    batches: Iterator[tuple[int, Any]], look_ahead: bool
) -> Iterator[tuple[int, Any, bool]]:
    """(index, batch, whether it is the last one); without `look_ahead` that is False."""
    if not look_ahead:
        yield from ((index, batch, False) for index, batch in batches)
        return
    held = next(batches, None)
    while held is not None:
        following = next(batches, None)
        yield (*held, following is None)
        held = following
