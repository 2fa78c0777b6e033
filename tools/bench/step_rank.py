"""One rank of step.py: the same model under every implementation, a few steps at a time."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from typing import Any

import torch
import torch.distributed
from rank_barrier import RankBarrier
from rank_service import serve
from source_tree import make_importable
from step_models import Model, models, parameter_count
from torch import nn

# Their parameters must be the same after training.
SYNCHRONIZED = ("gradsync", "gradsync_hold", "gradsync_hook", "ddp_group", "ddp_gloo")

_SEED = 4711
_BATCHES = 8
_LEARNING_RATE = 0.01
_MOMENTUM = 0.9


class _Contestant:
    """One copy of the model, wrapped, with an optimizer."""

    def __init__(self, module: nn.Module, wrapped: nn.Module) -> None:
        self.module = module
        self._wrapped = wrapped
        self._optimizer = torch.optim.SGD(
            module.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, foreach=True
        )
        self._steps = 0
        self._training: Any = None  # a gradsync.torch.Training, or None

    def hold(self) -> None:
        """From now on each step says where it begins, as `hold` needs."""
        import gradsync.torch

        self._training = gradsync.torch.Training(self._wrapped, self._optimizer)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Returns the seconds of its backward pass."""
        inputs, labels = batches[self._steps % len(batches)]
        self._steps += 1
        if self._training is not None:
            self._training.position(0, self._steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self._wrapped(inputs), labels)
        start = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter() - start
        self._optimizer.step()
        return backward


class StepRank:
    """What rank_service serves."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        """Joins the job and, if there is one, the process group.

        Args:
          configuration: as Stage.start_python_team() makes it, and
            quick: True for the small models;
            group: whether there is a process group;
            bucket_view: PyTorch's gradient_as_bucket_view, for all wrappers of its own;
            bucket_mb: MiB of a bucket, of every wrapper.
        """
        torch.set_num_threads(configuration["threads"])
        make_importable()
        import gradsync

        rank, ranks = configuration["rank"], configuration["ranks"]
        self._rank: int = rank
        self._quick: bool = configuration["quick"]
        self._bucket_view: bool = configuration["bucket_view"]
        self._bucket_mb: int = configuration["bucket_mb"]
        self._barrier = RankBarrier(configuration["barrier"], rank, ranks)
        if configuration["group"]:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{configuration['store']}", rank=rank, world_size=ranks
            )
        self._options = gradsync.SessionOptions(
            socket=configuration["socket"],
            job_id="step.py",
            rank=rank,
            world_size=ranks,
            coordinator=configuration["coordinator"],
        )
        self._session = gradsync.Session.join(self._options)
        self._holding: list[Any] = []
        # What a process group reads.
        os.environ["GRADSYNC_SOCKET"] = configuration["socket"]
        os.environ["GRADSYNC_COORDINATOR"] = configuration["coordinator"]
        self._contestants: dict[str, _Contestant] = {}
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_up(self, model_name: str, implementations: list[str]) -> dict[str, Any]:
        """Makes a copy of the model for each implementation; returns a ModelSize."""
        model = models(self._quick)[model_name]
        self._batches = model.batches(self._rank, _BATCHES)
        self._contestants = {}
        gc.collect()  # the model before
        count = 0
        for implementation in implementations:
            torch.manual_seed(_SEED)
            module = model.make()
            count = parameter_count(module)
            wrapped = self._wrap(implementation, module, model)
            contestant = self._contestants[implementation] = _Contestant(module, wrapped)
            if implementation == "gradsync_hold":
                contestant.hold()
        return {"what": model.what, "parameters": count, "batch": model.batch}

    def turn(self, implementation: str, steps: int) -> tuple[list[float], list[float], float]:
        """Runs some steps.

        Returns:
          The milliseconds of each, those outside its backward pass, and the CPU seconds of all.
        """
        contestant = self._contestants[implementation]
        times = []
        outside = []
        self._barrier.wait()
        cpu = time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            backward = contestant.step(self._batches)
            seconds = time.perf_counter() - start
            times.append(1e3 * seconds)
            outside.append(1e3 * (seconds - backward))
        return times, outside, time.process_time() - cpu

    def greatest_difference(self) -> float:
        """The greatest difference between synchronized parameters, on this rank and the others."""
        vectors = [
            torch.cat([p.detach().flatten() for p in self._contestants[name].module.parameters()])
            for name in SYNCHRONIZED
            if name in self._contestants
        ]
        if not vectors:
            return 0.0
        reference = vectors[0].clone()
        self._session.broadcast(reference.numpy(), root=0)
        difference = max(float((vector - reference).abs().max()) for vector in vectors)
        everywhere = torch.tensor([difference])
        self._session.all_reduce(everywhere.numpy(), op="max")
        return float(everywhere)

    def close(self) -> None:
        """Leaves the job."""
        self._contestants = {}
        for session in [*self._holding, self._session]:
            session.leave()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _wrap(self, implementation: str, module: nn.Module, model: Model) -> nn.Module:
        if implementation == "bare":
            return module
        import gradsync.torch

        if implementation in ("gradsync", "gradsync_hold"):
            session = self._session
            if implementation == "gradsync_hold":
                session = self._join_to_hold(model.name)
            return gradsync.torch.DistributedDataParallel(
                module, session=session, name=model.name, bucket_cap_mb=self._bucket_mb
            )
        group = None  # the default one, Gloo
        if implementation == "ddp_group":
            group = torch.distributed.new_group(backend="gradsync")
        ddp = nn.parallel.DistributedDataParallel(
            module,
            process_group=group,
            gradient_as_bucket_view=self._bucket_view,
            bucket_cap_mb=self._bucket_mb,
        )
        if implementation == "gradsync_hook":
            state = gradsync.torch.HookState(self._session, name=f"{model.name}-hook")
            ddp.register_comm_hook(state, gradsync.torch.allreduce_hook)
        elif implementation == "ddp_noop":
            ddp.register_comm_hook(None, _communicate_nothing)
        else:
            assert implementation in ("ddp_group", "ddp_gloo")
        return ddp

    def _join_to_hold(self, model_name: str) -> Any:
        """A session of a job of its own, which replaces lost ranks."""
        import gradsync

        options = dataclasses.replace(
            self._options, job_id=f"step.py-{model_name}", on_rank_loss="hold"
        )
        self._holding.append(gradsync.Session.join(options))
        return self._holding[-1]


# PyTorch compares annotations of hooks with its types, which these would be the names of.
def _communicate_nothing(_, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


if __name__ == "__main__":
    serve(StepRank)
