"""One rank of an all-reduce from Python: gradsync's package, PyTorch's Gloo, or DeepSpeed."""

from __future__ import annotations

import time
from typing import Any, Callable

import torch
import torch.distributed
from rank_barrier import RankBarrier
from rank_service import serve
from source_tree import make_importable

# Prime, so that no block, slice or page boundary falls on the same place of the pattern.
_PERIOD = 1021
# What an iteration adds to the pattern: small, so that sums are exact.
_ITERATIONS = 97


class _Gradsync:
    """One bucket, in memory shared with the daemon: no copy."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        make_importable()
        import gradsync

        self._gradsync = gradsync
        self._session = gradsync.Session.join(
            gradsync.SessionOptions(
                socket=configuration["socket"],
                job_id="allreduce_rank.py",
                rank=configuration["rank"],
                world_size=configuration["ranks"],
                coordinator=configuration["coordinator"],
            )
        )
        self._layout: Any = None
        self._step = 0

    def buffer(self, elements: int) -> torch.Tensor:
        self._layout = self._session.register_layout(
            f"{elements} elements", explicit_buckets=[self._gradsync.Bucket(elements)], op="sum"
        )
        view = self._layout.bucket(0)
        return torch.frombuffer(view.buffer, dtype=torch.float32, count=elements)

    def all_reduce(self, _: torch.Tensor) -> None:
        self._step = self._layout.next_step
        self._layout.mark_ready(self._step, 0)
        self._layout.wait_bucket(self._step, 0)

    def end_step(self) -> None:
        """Not timed."""
        self._layout.end_step(self._step)
        self._layout.wait_step(self._step)

    def close(self) -> None:
        self._session.leave()


class _Collective:
    """An all-reduce in place of private memory."""

    def __init__(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        self.all_reduce = all_reduce

    def buffer(self, elements: int) -> torch.Tensor:
        return torch.empty(elements)

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class AllReduceRank:
    """What rank_service serves. Implementations: gradsync_py, gloo_py and deepspeed."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        """Joins the other ranks; compiles DeepSpeed's extension if need be."""
        torch.set_num_threads(configuration["threads"])
        self._rank, self._ranks = configuration["rank"], configuration["ranks"]
        self._barrier = RankBarrier(configuration["barrier"], self._rank, self._ranks)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{configuration['store']}",
            rank=self._rank,
            world_size=self._ranks,
        )
        self._contestant: Any = {
            "gradsync_py": lambda: _Gradsync(configuration),
            "gloo_py": lambda: _Collective(torch.distributed.all_reduce),
            "deepspeed": lambda: _Collective(_deepspeed_all_reduce()),
        }[configuration["impl"]]()
        self._buffer = self._pattern = self._sum = torch.empty(0)

    def set_up(self, nbytes: int) -> None:
        """Makes a buffer of `nbytes` bytes."""
        elements = nbytes // 4
        places = torch.arange(elements) % _PERIOD
        patterns = [_pattern(places, rank) for rank in range(self._ranks)]
        self._pattern = patterns[self._rank]
        self._sum = torch.stack(patterns).sum(0)
        self._buffer = self._contestant.buffer(elements)

    def turns(self, begin: int, count: int, check_all: bool) -> list[dict[str, Any]]:
        """Rewrites, reduces and checks the buffer; what it holds depends on the iteration."""
        return [self._reduce(iteration, check_all) for iteration in range(begin, begin + count)]

    def _reduce(self, iteration: int, check_all: bool) -> dict[str, Any]:
        torch.add(self._pattern, float(iteration % _ITERATIONS), out=self._buffer)
        cpu_ns = time.process_time_ns()
        self._barrier.wait()
        call_ns = time.monotonic_ns()
        self._contestant.all_reduce(self._buffer)
        return_ns = time.monotonic_ns()
        self._barrier.wait()
        self._contestant.end_step()
        cpu_ns = time.process_time_ns() - cpu_ns
        wrong = 0
        if check_all:
            expected = self._sum + float(iteration % _ITERATIONS) * self._ranks
            wrong = int((self._buffer != expected).sum())
        return {"call_ns": call_ns, "return_ns": return_ns, "cpu_ns": cpu_ns, "wrong": wrong}

    def tear_down(self) -> None:
        """Frees the buffer."""
        self._buffer = self._pattern = self._sum = torch.empty(0)

    def close(self) -> None:
        """Leaves the other ranks."""
        self._contestant.close()
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


if __name__ == "__main__":
    serve(AllReduceRank)
