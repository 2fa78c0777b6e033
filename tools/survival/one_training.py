"""Runs one training, with a daemon that runs already, and returns its chain and its faults."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from chain import Link, read_chain
from fault_log import FaultLog
from nursery import STUCK_S, Nursery, TrainingFailed
from settings import Settings

_HERE = pathlib.Path(__file__).resolve().parent
_POLL_S = 0.1
_LINES_SHOWN = 60


class OneTraining:
    """A folder with the files of one training.

    Args:
      folder: a new one.
      job: name of the job.
      settings: of the training.
      daemon: path of the daemon's socket.
      daemon_log: its log, in JSON.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        job: str,
        settings: Settings,
        daemon: str,
        daemon_log: pathlib.Path,
    ) -> None:
        folder.mkdir()
        settings.write(folder)
        self.folder = folder
        self._job = job
        self._settings = settings
        self._daemon = daemon
        self._daemon_log = daemon_log
        self._log = FaultLog(folder / "faults.jsonl")

    def run(self, launcher: str, on_turn: Callable[[], None]) -> None:
        """Trains until every rank has ended.

        Args:
          launcher: "fork": the ranks are forks of this process; "run": `python -m gradsync.run`
            starts them.
          on_turn: is called now and then.

        Raises:
          TrainingFailed: a rank has failed.
        """
        try:
            if launcher == "fork":
                self._fork(on_turn)
            else:
                self._run(on_turn)
        finally:
            self._log.lines()
            self._log.close()

    def _fork(self, on_turn: Callable[[], None]) -> None:
        from trainer import train

        shared = {
            **self._environment(),
            "WORLD_SIZE": str(self._settings.ranks),
            "LOCAL_WORLD_SIZE": str(self._settings.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": self._job,
        }
        environments = [
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(self._settings.ranks)
        ]
        Nursery(
            lambda: train(self.folder), environments, self.folder, self._deaths, self._activity
        ).run(on_turn)

    def _run(self, on_turn: Callable[[], None]) -> None:
        command = [sys.executable, "-m", "gradsync.run", f"--rdzv-id={self._job}"]
        command += [f"--nproc-per-node={self._settings.ranks}"]
        command += [f"--max-restarts={len(self._settings.faults)}"]
        command += [str(_HERE / "trainer.py"), str(self.folder)]
        output = self.folder / "launcher.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self._environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        active, since = self._activity(), time.monotonic()
        try:
            while process.poll() is None:
                on_turn()
                time.sleep(_POLL_S)
                if active != self._activity():
                    active, since = self._activity(), time.monotonic()
                elif time.monotonic() - since > STUCK_S:
                    raise TrainingFailed(
                        f"nothing has happened for {STUCK_S:g} s{_last_lines(output)}"
                    )
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise TrainingFailed(
                f"gradsync.run ended with exit status {process.returncode}{_last_lines(output)}"
            )

    def _environment(self) -> dict[str, str]:
        return {
            "GRADSYNC_SOCKET": self._daemon,
            "GRADSYNC_JOB_TOKEN": "",
            "GRADSYNC_COORDINATOR": "",
            "OMP_NUM_THREADS": "1",
        }

    def chain(self) -> list[Link]:
        """What every rank had after every step."""
        return read_chain(self.folder, self._settings.ranks)

    def progress(self) -> str:
        """Where it is, in words."""
        links = len(self.chain())
        dead = sum(1 for _ in self._log.of("dies"))
        step = min(links // self._settings.ranks + 1, self._settings.steps)
        return f"step {step} of {self._settings.steps}, {dead} deaths"

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the fault log, after run()."""
        return self._log.lines()

    def ends(self) -> list[dict[str, Any]]:
        """The daemon's lines about sessions of this job that ended; each with "unix_ns"."""
        found = []
        for text in self._daemon_log.read_text().splitlines():
            line = json.loads(text)
            if self._job in str(line.get("job")) and line["message"] == "session ended":
                at = datetime.datetime.fromisoformat(line["time"].replace("Z", "+00:00"))
                found.append({**line, "unix_ns": int(at.timestamp() * 1e6) * 1000})
        return found

    def _deaths(self, rank: int) -> list[str]:
        return [line["how"] for line in self._log.of("dies") if line["rank"] == rank]

    def _activity(self) -> tuple[int, ...]:
        """Changes when a rank writes anything."""
        files = (*self.folder.glob("chain-*"), self.folder / "faults.jsonl")
        return tuple(file.stat().st_size for file in sorted(files))


def _last_lines(path: pathlib.Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
    return "".join(f"\n    {line}" for line in lines)
