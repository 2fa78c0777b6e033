"""One rank of a collective from Python: gradsync's package, PyTorch's groups, or DeepSpeed."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Optional

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
                job_id="collective_rank.py",
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

    def run(self, *_: torch.Tensor) -> None:
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
    """A collective of private memory. `run` gets the result's tensor and the one that is given."""

    def __init__(self, run: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self.run = run

    def buffer(self, elements: int) -> torch.Tensor:
        return torch.empty(elements)

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass


# In torch.distributed. An all-reduce is in place.
_COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda result, _: torch.distributed.all_reduce(result),
    "all_gather": torch.distributed.all_gather_into_tensor,
    "reduce_scatter": torch.distributed.reduce_scatter_tensor,
}


class CollectiveRank:
    """What rank_service serves. Implementations: those of lineup.PYTHON."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        """Joins the other ranks; compiles DeepSpeed's extension if need be."""
        torch.set_num_threads(configuration["threads"])
        self._rank, self._ranks = configuration["rank"], configuration["ranks"]
        self._barrier = RankBarrier(configuration["barrier"], self._rank, self._ranks)
        self._collective: str = configuration["collective"]
        backend = "gloo"
        if configuration["impl"] == "gradsync_group":
            make_importable()
            import gradsync.torch  # noqa: F401  # makes "gradsync" known

            os.environ["GRADSYNC_SOCKET"] = configuration["socket"]
            os.environ["GRADSYNC_COORDINATOR"] = configuration["coordinator"]
            backend = "gradsync"
        torch.distributed.init_process_group(
            backend,
            init_method=f"file://{configuration['store']}",
            rank=self._rank,
            world_size=self._ranks,
        )
        of_pytorch = _Collective(_COLLECTIVES[self._collective])
        self._contestant: Any = {
            "gradsync_py": lambda: _Gradsync(configuration),
            "gradsync_group": lambda: of_pytorch,
            "gloo_py": lambda: of_pytorch,
            "deepspeed": lambda: _Collective(_deepspeed_all_reduce()),
        }[configuration["impl"]]()
        self._buffers: Optional[_Buffers] = None

    def set_up(self, nbytes: int) -> None:
        """Makes buffers; the larger one, if there are two, has `nbytes` bytes."""
        self._buffers = _Buffers(
            self._collective, nbytes // 4, self._rank, self._ranks, self._contestant.buffer
        )

    def turns(self, begin: int, count: int, check_all: bool) -> list[dict[str, Any]]:
        """Rewrites what is given, runs and checks; the content depends on the iteration."""
        return [self._run(iteration, check_all) for iteration in range(begin, begin + count)]

    def _run(self, iteration: int, check_all: bool) -> dict[str, Any]:
        buffers = self._buffers
        assert buffers is not None
        buffers.rewrite(iteration)
        cpu_ns = time.process_time_ns()
        self._barrier.wait()
        call_ns = time.monotonic_ns()
        self._contestant.run(buffers.result, buffers.given)
        return_ns = time.monotonic_ns()
        self._barrier.wait()
        self._contestant.end_step()
        cpu_ns = time.process_time_ns() - cpu_ns
        wrong = buffers.wrong(iteration) if check_all else 0
        return {"call_ns": call_ns, "return_ns": return_ns, "cpu_ns": cpu_ns, "wrong": wrong}

    def tear_down(self) -> None:
        """Frees the buffers."""
        self._buffers = None

    def close(self) -> None:
        """Leaves the other ranks."""
        self._contestant.close()
        torch.distributed.destroy_process_group()


class _Buffers:
    """What a rank gives, where it gets the result, and what that must be.

    Attributes:
      given: as large as the result, or smaller for an all-gather, or larger for a reduce-scatter.
      result: the same tensor as `given` for an all-reduce.
    """

    def __init__(
        self,
        collective: str,
        elements: int,
        rank: int,
        ranks: int,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        places = torch.arange(elements) % _PERIOD
        patterns = [_pattern(places, other) for other in range(ranks)]
        part = elements // ranks
        self._pattern = patterns[rank]
        # How often the result contains what an iteration adds.
        self._times = ranks
        self._expected = torch.stack(patterns).sum(0)
        if collective == "all_gather":
            self._pattern = self._pattern[:part]
            self._times = 1
            self._expected = torch.cat([pattern[:part] for pattern in patterns])
        elif collective == "reduce_scatter":
            self._expected = self._expected[rank * part : (rank + 1) * part]
        self.given = self.result = allocate(self._pattern.numel())
        if collective != "all_reduce":
            self.result = allocate(self._expected.numel())

    def rewrite(self, iteration: int) -> None:
        """Writes `given`."""
        torch.add(self._pattern, float(iteration % _ITERATIONS), out=self.given)

    def wrong(self, iteration: int) -> int:
        """How many elements of `result` are."""
        expected = self._expected + float(iteration % _ITERATIONS) * self._times
        return int((self.result != expected).sum())


def _pattern(places: torch.Tensor, rank: int) -> torch.Tensor:
    """0 to 63 without visible regularity, another one for each rank."""
    mixed = (places + 1) * (2654435761 + 2 * rank * 40503)
    return ((mixed >> 13) % 64).to(torch.float32)


def _deepspeed_all_reduce() -> Callable[[torch.Tensor, torch.Tensor], Any]:
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
    return lambda result, _: comm.inference_all_reduce(result)


if __name__ == "__main__":
    serve(CollectiveRank)
