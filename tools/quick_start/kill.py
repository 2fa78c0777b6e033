"""tools/quickstart --kill: a training whose ranks are killed, and the same without."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, Optional

from command_line import write_json
from launcher import Child, Failed, Launcher, Node
from losses import Loss, Losses
from text_style import Progress, TextStyle

_ROOT = pathlib.Path(__file__).absolute().parents[2]
_TRAINER = _ROOT / "client/python/examples/train_digits.py"
_COMPARE = pathlib.Path(__file__).absolute().with_name("compare_models.py")
PROGRAMS = {
    "daemon": "daemon/gradsyncd",
    "gradsyncctl": "tools/gradsyncctl/gradsyncctl",
    "library": "client/libgradsync.so",
}
STEPS = 2000
_KILLS = 4
_LEAST_STEPS = 200  # for so many kills
_COLUMNS = 64
_LOOK_S = 0.02


class Kill:
    """One run, in the order of its methods."""

    def __init__(
        self, arguments: argparse.Namespace, programs: pathlib.Path, launcher: Launcher
    ) -> None:
        self._arguments = arguments
        self._programs = {name: str(programs / path) for name, path in PROGRAMS.items()}
        self._launcher = launcher
        self._style = TextStyle()
        self._ranks = arguments.ranks
        self._steps = arguments.steps
        self._progress = Progress(self._steps, self._style)
        self._socket = ""
        self._losses: Optional[Losses] = None
        self._accuracy = math.nan
        self._seconds = 0.0
        self._failure = ""

    def run(self) -> None:
        """Raises Failed if something does not work; failures() says whether the result is right."""
        trainers = f"{self._ranks} trainers, one daemon"
        title = f"gradsync quick start: {trainers}, and ranks that are killed"
        print(self._style.bold(title) + "\n")
        child, self._socket = self._launcher.start_daemon(
            self._programs["daemon"], Node(), None, ["--cuda_library=none"]
        )
        print(f"  {'gradsyncd':10} pid {child.pid}   {self._socket}")
        print(f"  {'trainers':10} PyTorch, handwritten digits, {self._steps} steps\n")
        self._train_and_kill()
        print(self._style.dim("  ... the same again, without faults and without hold"))
        self._await(self._start("without", []))
        compared = self._compare()
        self._print_picture()
        self._print_result(compared)
        write_json(self._arguments.json, self._json(compared))

    def failures(self) -> list[str]:
        """What is wrong with the result, in words."""
        return [self._failure] if self._failure else []

    def _model(self, name: str) -> pathlib.Path:
        return self._launcher.directory / f"{name}.pt"

    def _start(self, name: str, flags: list[str]) -> Child:
        command = [_python(), "-m", "gradsync.run", f"--nproc-per-node={self._ranks}"]
        command += [f"--max-restarts={_KILLS}", str(_TRAINER), f"--steps={self._steps}"]
        command += [f"--save={self._model(name)}", *flags]
        environment = {
            "GRADSYNC_SOCKET": self._socket,
            "GRADSYNC_LIBRARY": self._programs["library"],
            "GRADSYNC_JOB_TOKEN": "",
            "PYTHONPATH": str(_ROOT / "client/python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            # PyTorch makes a folder there as soon as an optimizer is used.
            "TORCHINDUCTOR_CACHE_DIR": str(self._launcher.directory / "torch"),
        }
        child = self._launcher.start(f"the training {name} faults", Node(), command, environment)
        self._launcher.close_input(child)
        return child

    def _await(self, child: Child) -> None:
        self._launcher.wait_for(lambda: child.ended)

    def _train_and_kill(self) -> None:
        kills = max(1, min(_KILLS, self._steps * _KILLS // _LEAST_STEPS))
        at_steps = [self._steps * (i + 1) // (kills + 1) for i in range(kills)]
        self._losses = losses = Losses(
            self._programs["gradsyncctl"],
            self._socket,
            self._ranks,
            at_steps,
            self._steps,
            self._say,
        )
        child = self._start("with", ["--on-rank-loss=hold"])
        while not self._launcher.wait_for(lambda: child.ended, _LOOK_S):
            losses.look()
            self._progress.show_step(losses.step)
            self._seconds = losses.seconds
        losses.finish()
        self._progress.end()
        found = re.search(r"([\d.]+) % of \d+ held-out digits right", "\n".join(child.said))
        if found is None:
            raise Failed(f"the training said nothing of its accuracy: {child.describe()}")
        self._accuracy = float(found[1])
        if not losses.losses:
            raise Failed("the training ended before a rank could be killed; give more --steps")

    def _say(self, text: str) -> None:
        self._progress.say(f"  {text}")

    def _compare(self) -> dict[str, Any]:
        command = [_python(), str(_COMPARE), str(self._model("with"))]
        command += [str(self._model("without"))]
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode != 0:
            raise Failed(f"the models cannot be compared: {asked.stderr}")
        compared: dict[str, Any] = json.loads(asked.stdout)
        if compared["different"]:
            self._failure = (
                f"the models differ: {compared['different'][0]}, and "
                f"{len(compared['different']) - 1} more of {compared['tensors']}"
            )
        return compared

    def _print_picture(self) -> None:
        assert self._losses is not None
        losses = self._losses.losses
        unicode = self._style.unicode
        trains, waits, lost, killed = ("━", "╌", " ", "✗") if unicode else ("=", "-", " ", "X")
        total = max(self._seconds, 1e-9)

        def column(seconds: float) -> int:
            return min(_COLUMNS - 1, int(seconds / total * _COLUMNS))

        print(f"\n{self._style.bold('Who was lost, and when')}\n")
        for rank in range(self._ranks):
            row = [trains] * _COLUMNS
            for loss in losses:
                end = total if loss.back_s is None else loss.back_s
                for place in range(column(loss.killed_s), column(end)):
                    row[place] = lost if loss.rank == rank else waits
                if loss.rank == rank:
                    row[column(loss.killed_s)] = killed
            print(f"  rank {rank:<3} {self._paint(''.join(row), killed)}")
        print(f"  {'':8} 0 s{f'{total:.1f} s':>{_COLUMNS - 3}}")
        print(f"  {trains} trains   {killed} killed, gone until it is back   {waits} waits for it")
        head = f"{'rank':6}{'killed in step':>16}{'known after':>14}{'held for':>12}   process"
        print(f"\n  {head}")
        for loss in losses:
            known = "-" if loss.known_s is None else f"{loss.known_s - loss.killed_s:.2f} s"
            new = f"pid {loss.pid} -> {loss.new_pid}" if loss.new_pid else "none"
            print(f"  {loss.rank:<6}{loss.step:>16}{known:>14}{_held(loss):>12}   {new}")
        print(
            "\n  Most of that time a new Python imports PyTorch. The daemon was asked every "
            f"{1000 * _LOOK_S:.0f} ms."
        )

    def _paint(self, row: str, killed: str) -> str:
        return row.replace(killed, self._style.bad(killed))

    def _print_result(self, compared: dict[str, Any]) -> None:
        assert self._losses is not None
        good = not self._failure
        what = "same bits" if good else "OTHER BITS"
        print(f"\n{self._style.bold('What came out')}\n")
        print(f"  {'test accuracy':24} {self._accuracy:.1f} %")
        print(f"  {'ranks killed':24} {len(self._losses.losses)}")
        print(
            f"  {'against no faults':24} {self._style.bold(what)}   {self._style.mark(good)}  "
            + self._style.dim(f"{compared['tensors']} tensors, {compared['bytes']} bytes")
        )

    def _json(self, compared: dict[str, Any]) -> dict[str, Any]:
        assert self._losses is not None
        losses = [
            {
                "rank": loss.rank,
                "pid": loss.pid,
                "new_pid": loss.new_pid,
                "step": loss.step,
                "known_s": None if loss.known_s is None else loss.known_s - loss.killed_s,
                "held_s": None if loss.back_s is None else loss.held_s,
            }
            for loss in self._losses.losses
        ]
        return {
            "ranks": self._ranks,
            "steps": self._steps,
            "test_accuracy": self._accuracy,
            "losses": losses,
            "tensors": compared["tensors"],
            "same_bits": not compared["different"],
            "failures": self.failures(),
        }


def _held(loss: Loss) -> str:
    return "-" if loss.back_s is None else f"{loss.held_s:.2f} s"


def _python() -> str:
    """A Python that has PyTorch: .venv's, else this one."""
    # Bazel links to this file from its sandbox.
    venv = pathlib.Path(__file__).resolve().parents[2] / ".venv/bin/python"
    return str(venv) if os.access(venv, os.X_OK) else sys.executable
