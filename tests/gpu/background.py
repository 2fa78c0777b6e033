"""What runs beside the parts, and what it writes into the logs."""

import json
import pathlib
import subprocess
import sys


class Background:
    """Started with a run, ended with it."""

    def __init__(self, logs, libraries, on_machine):
        self.logs = logs
        here = pathlib.Path(__file__).resolve()
        self.packages_json = logs / "python.json"
        self.processes = []
        with open(self.packages_json, "wb") as output:
            self.start(["python3", here.with_name("python_packages.py")], output)
        with open(logs / "nvidia-smi.txt", "wb") as output:
            self.start(["nvidia-smi", "-q"], output)
        holder = [sys.executable, here.with_name("held_context.py"), libraries.cuda]
        self.holder = self.start(on_machine(holder), subprocess.DEVNULL)

    def start(self, command, output):
        """The process; None if the machine lacks the program."""
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None
        self.processes.append(process)
        return process

    def packages(self):
        """What python_packages.py found, once it is done."""
        try:
            return json.loads(self.packages_json.read_text())
        except ValueError:
            return None

    def release_context(self):
        """MPS has to be the first on the GPU."""
        if self.holder is not None and self.holder.poll() is None:
            self.holder.stdin.close()
            try:
                self.holder.wait(20)
            except subprocess.TimeoutExpired:
                self.holder.kill()

    def stop(self):
        self.release_context()
        for process in self.processes:
            process.kill()
            process.wait()
        with open(self.logs / "nvidia-smi-at-the-end.txt", "wb") as output:
            last = self.start(["nvidia-smi", "-q"], output)
        if last is not None:
            try:
                last.wait(20)
            except subprocess.TimeoutExpired:
                last.kill()
