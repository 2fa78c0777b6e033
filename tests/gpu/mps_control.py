"""A private MPS control daemon."""

import os
import pathlib
import shutil
import subprocess


class MpsControl:
    """Runs MPS for some parts of a run, with its pipes and logs in `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.control = shutil.which("nvidia-cuda-mps-control")
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        self.running = False

    def start(self):
        """Starts MPS. Returns None, or why it does not run."""
        if self.running:
            return None
        if self.control is None:
            return "nvidia-cuda-mps-control does not exist"
        for folder in self.environment.values():
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            # No pipes: what it leaves running would keep them open.
            with open(self.folder / "control", "wb") as said:
                started = subprocess.run(
                    [self.control, "-d"],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=20,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return "nvidia-cuda-mps-control does not start"
        self.running = started.returncode == 0
        said = (self.folder / "control").read_text(errors="replace").strip()
        return None if self.running else said or f"exit status {started.returncode}"

    def stop(self):
        if not self.running:
            return
        self.running = False
        try:
            subprocess.run(
                [self.control],
                input="quit -t 1\n",
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pass
