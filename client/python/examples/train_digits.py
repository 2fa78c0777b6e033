"""Trains a small network on handwritten digits with PyTorch, one rank per process.

    gradsyncd --socket=/tmp/try/gradsyncd.sock &
    export GRADSYNC_SOCKET=/tmp/try/gradsyncd.sock
    torchrun --nproc_per_node=2 client/python/examples/train_digits.py --backend gradsync

Backends: `gradsync` is gradsync's wrapper; `hook` is PyTorch's wrapper with gradsync's hook;
`group` is PyTorch's wrapper on the process group "gradsync"; `ddp` is PyTorch's wrapper with Gloo,
for comparison. All start from the same seed and see the same batches, so their parameters end
within 1e-5 of each other. Rank 0 prints time and accuracy. With --save it also writes the
parameters.

With --on-rank-loss hold a killed rank is replaced, and the others only wait. The parameters end
with the same bits as without the kill. Try `kill -9` on any rank:

    python -m gradsync.run --nproc-per-node 2 --max-restarts 3 \
        client/python/examples/train_digits.py --on-rank-loss hold --steps 5000
"""

from __future__ import annotations

import argparse
import atexit
import csv
import gzip
import os
import pathlib
import sys
import threading
import time

import torch

_HERE = pathlib.Path(__file__).resolve()
_DATA = _HERE.parents[2] / "examples" / "data" / "digits.csv.gz"
_HELD_OUT = 5  # every fifth image
_BATCH = 96  # of all ranks together


def load(path: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape [n, 64], 0 to 1, and their digits of shape [n]."""
    with gzip.open(path, "rt", newline="") as file:
        rows = torch.tensor([[float(x) for x in row] for row in csv.reader(file)])
    return rows[:, :-1] / 16, rows[:, -1].long()


def make_module() -> torch.nn.Module:
    """A perceptron with batch normalization, so it has buffers to synchronize, too."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 384),
        torch.nn.BatchNorm1d(384),
        torch.nn.ReLU(),
        torch.nn.Linear(384, 192),
        torch.nn.ReLU(),
        torch.nn.Linear(192, 10),
    )


def wrap(module: torch.nn.Module, backend: str) -> torch.nn.Module:
    """Wraps `module` so that its gradients are averaged over the ranks."""
    if backend == "gradsync":
        from gradsync.torch import DistributedDataParallel

        return DistributedDataParallel(module, bucket_cap_mb=0.1, first_bucket_cap_mb=0.02)
    torch.distributed.init_process_group("gradsync" if backend == "group" else "gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.1)
    if backend == "hook":
        import gradsync.torch

        wrapped.register_comm_hook(None, gradsync.torch.allreduce_hook)
    return wrapped


def spare_teardown() -> threading.Event:
    """Returns an event. If it is set, the process exits with status 0, without Python's teardown.

    PyTorch's Gloo threads free Python objects of the last backward pass a moment after its
    all-reduce. If the interpreter ends in that moment, the process aborts with "terminate called
    without an active exception" (PyTorch 2.13: one process in nine on a busy machine). Functions
    that are registered later, as gradsync's for leaving the job, still run: they run earlier.
    """
    done = threading.Event()

    def end() -> None:
        if done.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    atexit.register(end)
    return done


def accuracy(module: torch.nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    """The share of `images` whose digit `module` recognizes."""
    module.eval()
    with torch.no_grad():
        right = (module(images).argmax(1) == digits).float().mean().item()
    module.train()
    return right


def main() -> int:
    """Trains; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backend", choices=["gradsync", "hook", "group", "ddp"], default="gradsync"
    )
    parser.add_argument(
        "--on-rank-loss",
        choices=["abort", "hold"],
        default="abort",
        help="whether a lost rank ends the job, or is replaced; hold needs the backend gradsync",
    )
    parser.add_argument("--steps", type=int, default=200, help="default 200")
    parser.add_argument("--data", type=pathlib.Path, default=_DATA, help="digits.csv.gz")
    parser.add_argument("--save", type=pathlib.Path, help="rank 0 writes the parameters there")
    parser.add_argument(
        "--crash-at",
        type=int,
        metavar="STEP",
        help="the last rank aborts in this step, once; shows --max-restarts",
    )
    options = parser.parse_args()
    if options.on_rank_loss == "hold" and options.backend != "gradsync":
        parser.error("--on-rank-loss hold needs --backend gradsync")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first_life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0
    torch.set_num_threads(1)

    images, digits = load(options.data)
    held_out = torch.arange(len(images)) % _HELD_OUT == 0
    test_images, test_digits = images[held_out], digits[held_out]
    images, digits = images[~held_out], digits[~held_out]
    done = spare_teardown()
    started = time.monotonic()
    module = make_module()
    if options.on_rank_loss == "hold":
        import gradsync.torch

        gradsync.torch.init(on_rank_loss="hold")
    model = wrap(module, options.backend)
    joined = time.monotonic() - started
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shuffle = torch.Generator().manual_seed(2)
    batches = [
        torch.randint(len(images), (_BATCH,), generator=shuffle) for _ in range(options.steps)
    ]
    first_step, training = 0, None
    if options.on_rank_loss == "hold":
        training = gradsync.torch.Training(model, optimizer)
        _, first_step = training.start  # of a replacement; the state of the model has arrived
        if training.is_replacement:
            print(f"rank {rank} is back in step {first_step}", flush=True)
    for step in range(first_step, options.steps):
        if training is not None:
            training.position(0, step)
        shard = batches[step][rank::world_size]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[shard]), digits[shard])
        if options.crash_at == step and first_life and rank == world_size - 1:
            os.abort()
        loss.backward()
        optimizer.step()
    if rank == 0:
        right = accuracy(module, test_images, test_digits)
        print(
            f"{options.backend}, {world_size} ranks: {options.steps} steps in "
            f"{time.monotonic() - started - joined:.2f} s after {joined:.2f} s to join, "
            f"{100 * right:.1f} % of {len(test_images)} held-out digits right",
            flush=True,
        )
        if options.save:
            torch.save(module.state_dict(), options.save)
    if options.backend != "gradsync":
        torch.distributed.destroy_process_group()
        done.set()
    return 0


if __name__ == "__main__":
    try:
        import gradsync as _  # noqa: F401
    except ModuleNotFoundError:  # not installed: the package of this source tree
        sys.path.insert(0, str(_HERE.parents[1]))
        import gradsync.torch as _  # noqa: F401  # makes "gradsync" known, as the wheel does
    sys.exit(main())
