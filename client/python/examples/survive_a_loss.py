"""Trains on handwritten digits, and goes on when a rank is killed. Without PyTorch.

    python -m gradsync.run --nproc-per-node 4 --max-restarts 3 \
        client/python/examples/survive_a_loss.py --state /tmp/state

Kill any rank while it runs, as with `kill -9`. The launcher starts that rank again. The new process
takes its place in the step that was running, and the other ranks only wait. The last line, a hash
of the model, is the same as without the kill.

With on_rank_loss="hold" gradsync keeps the step. With state_source="trainer" the script brings the
model to the new process: every rank writes it into a file after every step. The lost rank may have
died before it wrote its own, so the new process takes the file of any rank.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import os
import pathlib
import time

import gradsync
import numpy as np

_DATA = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data" / "digits.csv.gz"
_BATCH = 32  # of each rank
_KEPT = 2  # steps whose files stay: a rank may be one step behind the others
_PATIENCE_S = 60.0


def load(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Images of shape [n, 64], 0 to 1, and their digits of shape [n]."""
    with gzip.open(path, "rt", newline="") as file:
        rows = np.array([[float(x) for x in row] for row in csv.reader(file)], dtype="f4")
    return rows[:, :-1] / 16, rows[:, -1].astype("i8")


def gradient_of(weight: np.ndarray, images: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """The gradient of the cross entropy of softmax(images @ weight), averaged over the images."""
    scores = images @ weight
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(digits)), digits] -= 1
    return images.T @ chances / np.float32(len(digits))


def save(folder: pathlib.Path, rank: int, step: int, weight: np.ndarray) -> None:
    """Writes the model after `step`; whoever sees the file sees all of it."""
    part = folder / f"rank{rank}.part"
    with part.open("wb") as file:
        np.save(file, weight)
    part.rename(folder / f"step{step}-rank{rank}.npy")
    (folder / f"step{step - _KEPT}-rank{rank}.npy").unlink(missing_ok=True)


def model_after(folder: pathlib.Path, step: int) -> np.ndarray:
    """The model after `step`, from any rank's file. Waits for the first one."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for path in folder.glob(f"step{step}-rank*.npy"):
            try:
                return np.load(path)
            except FileNotFoundError:  # its rank has gone on, and removed it
                continue
        time.sleep(0.01)  # backs off: a file tells nothing without being asked
    raise TimeoutError(f"no rank has written the model after step {step} into {folder}")


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=pathlib.Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", type=pathlib.Path, default=_DATA)
    given = parser.parse_args()
    given.state.mkdir(parents=True, exist_ok=True)
    images, digits = load(given.data)
    weight = np.zeros((images.shape[1], 10), dtype="f4")

    with gradsync.Session.join(on_rank_loss="hold", state_source="trainer") as session:
        layout = session.register_layout(parameters=[gradsync.Parameter("weight", weight.shape)])
        if session.is_replacement:
            weight = model_after(given.state, layout.next_step - 1)
            print(f"goes on with step {layout.next_step}", flush=True)
        gradient = layout.gradient(0).numpy().reshape(weight.shape)
        while layout.next_step <= given.steps:
            step = layout.next_step
            # The data depend on the step and the rank alone, so a new process gets the same.
            picks = np.random.default_rng([step, session.rank]).integers(len(digits), size=_BATCH)
            gradient[:] = gradient_of(weight, images[picks], digits[picks])
            layout.finish_step(step)
            layout.wait_step(step)
            weight -= np.float32(0.5) * gradient
            save(given.state, session.rank, step, weight)
        if session.rank == 0:
            right = np.mean((images @ weight).argmax(axis=1) == digits)
            model = hashlib.sha256(weight.tobytes()).hexdigest()[:16]
            print(f"{given.steps} steps: {100 * right:.1f} % of {len(digits)}, model {model}")


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        raise SystemExit("run this by 'python -m gradsync.run'; --help of that says how")
    main()
