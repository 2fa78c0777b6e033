"""One rank of allreduce.py: every implementation of an all-reduce, in turns."""

from __future__ import annotations

import time
from typing import Any, Callable, Protocol

import torch
import torch.distributed
from rank_barrier import RankBarrier
from source_tree import make_importable
from stage import Meeting

# Prime, so that no block, slice or page boundary falls on the same place of the pattern.
_PERIOD = 1021
# What an iteration adds to the pattern: small, so that sums are exact.
_ITERATIONS = 97


class _Implementation(Protocol):
    """An all-reduce: the sum over the ranks, in place."""

    buffer: torch.Tensor

    def all_reduce(self) -> None:
        """Returns when the sum is in the buffer."""

    def settle(self) -> None:
        """What has to follow, and is not timed."""


class _Gradsync:
    """One bucket, in memory shared with the daemon: no copy."""

    def __init__(self, session: Any, elements: int) -> None:
        import gradsync

        self._layout = session.register_layout(
            f"{elements} elements", explicit_buckets=[gradsync.Bucket(elements)], op="sum"
        )
        view = self._layout.bucket(0)
        self.buffer = torch.frombuffer(view.buffer, dtype=torch.float32, count=elements)
        self._step = 0

    def all_reduce(self) -> None:
        self._step = self._layout.next_step
        self._layout.mark_ready(self._step, 0)
        self._layout.wait_bucket(self._step, 0)

    def settle(self) -> None:
        self._layout.end_step(self._step)
        self._layout.wait_step(self._step)


class _Gloo:
    def __init__(self, elements: int) -> None:
        self.buffer = torch.empty(elements)

    def all_reduce(self) -> None:
        torch.distributed.all_reduce(self.buffer)

    def settle(self) -> None:
        pass


class _DeepSpeed:
    """Through DeepSpeed's own interface, which takes its shared memory if it can."""

    def __init__(self, all_reduce: Callable[[torch.Tensor], Any], elements: int) -> None:
        self.buffer = torch.empty(elements)
        self._all_reduce = all_reduce

    def all_reduce(self) -> None:
        self._all_reduce(self.buffer)

    def settle(self) -> None:
        pass


class AllReduceRank:
    """What RankTeam's ranks are made of."""

    def __init__(self, rank: int, meeting: Meeting, implementations: tuple[str, ...]) -> None:
        """Joins the job and the process group, and compiles DeepSpeed's if need be."""
        torch.set_num_threads(meeting.threads)
        make_importable()
        import gradsync

        self._rank = rank
        self._ranks = meeting.ranks
        self._barrier = RankBarrier(meeting.barrier, rank, meeting.ranks)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting.store}", rank=rank, world_size=meeting.ranks
        )
        self._session = gradsync.Session.join(
            gradsync.SessionOptions(
                socket=meeting.socket_of(rank),
                job_id="allreduce.py",
                rank=rank,
                world_size=meeting.ranks,
            )
        )
        self._deepspeed: Any = None
        if "deepspeed" in implementations:
            self._deepspeed = _deepspeed_all_reduce()
        self._implementations: dict[str, _Implementation] = {}
        self._pattern = torch.empty(0)
        self._sum = torch.empty(0)

    def set_up(self, nbytes: int, implementations: tuple[str, ...]) -> None:
        """Makes buffers of `nbytes` bytes."""
        elements = nbytes // 4
        makers: dict[str, Callable[[], _Implementation]] = {
            "gradsync": lambda: _Gradsync(self._session, elements),
            "gloo": lambda: _Gloo(elements),
            "deepspeed": lambda: _DeepSpeed(self._deepspeed, elements),
        }
        self._implementations = {}
        self._implementations = {name: makers[name]() for name in implementations}
        places = torch.arange(elements) % _PERIOD
        patterns = [_pattern(places, rank) for rank in range(self._ranks)]
        self._pattern = patterns[self._rank]
        self._sum = torch.stack(patterns).sum(0) if elements else self._pattern

    def turn(self, name: str, iteration: int, check: bool) -> tuple[int, int, float, int]:
        """One all-reduce of a buffer that was rewritten just before.

        Args:
          name: the implementation.
          iteration: what the buffer holds depends on it.
          check: whether to compare the result with the sum.

        Returns:
          When the call began and ended in nanoseconds of CLOCK_MONOTONIC, its CPU seconds, and how
          many elements were wrong.
        """
        implementation = self._implementations[name]
        shift = float(iteration % _ITERATIONS)
        torch.add(self._pattern, shift, out=implementation.buffer)
        self._barrier.wait()
        cpu = time.process_time()
        start = time.monotonic_ns()
        implementation.all_reduce()
        end = time.monotonic_ns()
        cpu = time.process_time() - cpu
        implementation.settle()
        wrong = 0
        if check:
            expected = self._sum + shift * self._ranks
            wrong = int((implementation.buffer != expected).sum())
        return start, end, cpu, wrong

    def cpu_seconds(self) -> float:
        """Of this process so far."""
        return time.process_time()

    def close(self) -> None:
        """Leaves the job."""
        self._session.leave()
        torch.distributed.destroy_process_group()


def _pattern(places: torch.Tensor, rank: int) -> torch.Tensor:
    """0 to 63 without visible regularity, another one for each rank."""
    mixed = (places + 1) * (2654435761 + 2 * rank * 40503)
    return ((mixed >> 13) % 64).to(torch.float32)


def _deepspeed_all_reduce() -> Callable[[torch.Tensor], Any]:
    """DeepSpeed's all-reduce in shared memory.

    Raises:
      RuntimeError: DeepSpeed would use something else.
    """
    import deepspeed  # type: ignore[import-not-found,unused-ignore]
    from deepspeed import comm

    deepspeed.init_distributed(dist_backend="gloo")
    # inference_all_reduce() falls back to the process group where these do not hold.
    backend = getattr(comm.comm, "cdb", None)
    level = getattr(backend, "shm_vector_kernel_level", 0)
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_") or level < 1:
        raise RuntimeError(
            "DeepSpeed has not built its shared-memory all-reduce (ShareMemCommBuilder: needs g++, "
            "ninja, Python's headers and AVX2)"
        )
    all_reduce: Callable[[torch.Tensor], Any] = comm.inference_all_reduce
    return all_reduce
