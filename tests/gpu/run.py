"""One run of the parts on this machine."""

import json
import os
import signal
import subprocess
import sys
import time

import gpu_machine
import own_glibc
import targets
from answers import READERS
from background import Background
from driver_libraries import DriverLibraries
from logs import Logs
from mps_control import MpsControl
from parts import Parts
from report import Report


class Run:
    """A run of the unpacked `bundle`. `work` is an empty folder, which may be deleted."""

    def __init__(self, options, bundle, work):
        self.begin = time.monotonic()
        self.options = options
        self.bundle = bundle
        self.work = work
        self.mps = MpsControl(work / "mps")
        self.logs = Logs(work / "logs")
        about = json.loads((bundle / "bundle.json").read_text())
        old_glibc = own_glibc.is_needed(about["glibc"])
        if old_glibc:
            own_glibc.use(bundle, about["glibc"])
        fakes = bundle / "fakes"
        self.libraries = (
            DriverLibraries(str(fakes / "libcuda.so.1"), str(fakes / "libnccl.so.2"))
            if options.fakes
            else DriverLibraries.of_this_machine()
        )
        self.report = Report(options.out, about["commit"], options.fakes)
        self.machine = gpu_machine.describe(self.libraries, self.on_machine)
        self.report.content["machine"] = self.machine
        self.parts = Parts(
            bundle, work, self.libraries, len(self.machine["gpus"]), options.fakes, old_glibc
        )

    def on_machine(self, command, mps=False):
        """The command, which runs on a fake machine if --fakes is given."""
        if self.options.fakes:
            machine = [self.bundle / "fakes/fake_machine", f"--gpus={self.options.fake_gpus}"]
            command = [*machine, *(["--mps"] if mps else []), "--", *command]
        return [str(word) for word in command]

    def run(self):
        folder = self.work / "run"
        self.lay_out(folder)
        (self.work / "tmp").mkdir()
        wanted = self.options.only
        beside = Background(self.logs.start_part("machine"), self.libraries, self.on_machine)
        try:
            for part in self.parts:
                if not wanted or part.name in wanted or part.kind in wanted:
                    if part.mps:
                        beside.release_context()
                    self.run_part(part, folder)
                    self.report.content["packages"] = beside.packages()
                    self.write()
        finally:
            self.mps.stop()
            beside.stop()
        self.report.content["complete"] = True
        self.write()

    def lay_out(self, folder):
        """The folder in which tests find the files that the build puts beside them."""
        for source, target in (
            (self.bundle / "bin/gradsyncd", "daemon/gradsyncd"),
            (self.bundle / "tests/libold.so", "tests/cuda/libold.so"),
            (self.libraries.cuda, "tests/fakes/cuda/libcuda.so.1"),
            (self.libraries.nccl, "tests/fakes/nccl/libnccl.so.2"),
        ):
            if source is not None:
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                (folder / target).symlink_to(source)

    def write(self):
        size = 256 * 1024 if self.options.fakes else 100 * targets.MIB
        content = self.report.content
        content["targets"] = targets.judge(content["benches"], size, self.options.fakes)
        self.report.write()
        left_out = self.logs.pack(self.options.out)
        if left_out != content["logs_left_out"]:
            content["logs_left_out"] = left_out
            self.report.write()

    def left_s(self):
        return self.options.limit - (time.monotonic() - self.begin)

    def run_part(self, part, folder):
        result = {"name": part.name}
        self.report.content[part.kind].append(result)
        if not part.mps:
            self.mps.stop()
        elif not self.options.fakes:
            part.needs = part.needs or self.mps.start()
        if self.options.fakes and part.not_on_fakes is not None:
            result.update(verdict="not applicable", why=part.not_on_fakes)
        elif part.needs is not None:
            result.update(verdict="not available", why=part.needs)
        elif self.left_s() < 1:
            result.update(verdict="not run", why="no time was left")
        else:
            self.run_process(part, folder, result)
        elapsed_s = time.monotonic() - self.begin
        why = f": {result['why']}" if result.get("why") else ""
        print(f"[{elapsed_s:5.0f} s] {part.kind:11} {part.name:32} {result['verdict']}{why}")
        sys.stdout.flush()

    def run_process(self, part, folder, result):
        logs = self.logs.start_part(part.name)
        limit_s = min(part.limit_s, self.left_s())
        began = time.monotonic()
        shards = min(part.shards, self.machine["cores"])
        processes = []
        try:
            for shard in range(shards):
                environment = self.environment(part, logs)
                if shards > 1:
                    environment["GTEST_TOTAL_SHARDS"] = str(shards)
                    environment["GTEST_SHARD_INDEX"] = str(shard)
                with open(logs / f"output-{shard}.log", "wb") as output:
                    processes.append(
                        subprocess.Popen(
                            self.on_machine(part.command, part.mps),
                            cwd=folder,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            statuses = [wait_until(process, began + limit_s) for process in processes]
        finally:
            for process in processes:
                end_group(process)
        result["seconds"] = round(time.monotonic() - began, 1)
        failure = None
        if None in statuses:
            failure = f"no end within {limit_s:.0f} s"
        elif min(statuses) < 0:
            failure = f"ended by signal {-min(statuses)}"
        status = next((status for status in statuses if status), 0)
        paths = sorted(logs.glob("output-*.log"))
        text = "".join(path.read_text(errors="replace") for path in paths)
        READERS[part.kind](part, result, status, failure, text)
        if self.options.fakes and part.of_speed and result["verdict"] == "does not hold":
            result.update(verdict="not applicable", why="fakes have no speed")
        if result["verdict"] not in ("passed", "holds", "measured", "not applicable"):
            result["output"] = text[-3000:]

    def environment(self, part, logs):
        folders = [self.libraries.folders(), os.environ.get("LD_LIBRARY_PATH")]
        return {
            **os.environ,
            **(self.mps.environment if part.mps else {}),
            "TMPDIR": str(self.work / "tmp"),
            "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
            "GRADSYNC_CUDA_LIBRARY": self.libraries.cuda,
            "GRADSYNC_TEST_DAEMON_LOGS": str(logs),
            # The driver's and NCCL's errors in words. NCCL writes to standard output by default.
            "CUDA_LOG_FILE": "stderr",
            "NCCL_DEBUG": "WARN",
            "NCCL_DEBUG_FILE": str(logs / "nccl.%p.log"),
            "GRADSYNC_REAL_GPUS": ",".join(gpu["uuid"] for gpu in self.machine["gpus"]),
        }


def wait_until(process, end):
    """The process's exit status; None if it runs longer."""
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def end_group(process):
    """Ends the process and the processes that it has left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(3)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
