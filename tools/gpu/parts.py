"""The parts of a run: their programs, arguments and time limits."""

import pathlib
import re

TESTS = [
    "cuda_start_test",
    "cuda_launch_test",
    "nccl_launch_test",
    "cuda_layout_test",
    "cuda_job_test",
]
EXPERIMENTS = [
    "cuda_mapping_survival",
    "cuda_overlap",
    "nccl_abort_parked",
    "cuda_pid_namespace_import",
    "cuda_shared_words",
]
# The last may leave the GPU unwell.
MPS_EXPERIMENTS = ["cuda_overlap", "cuda_shared_words", "cuda_busy_mps_trainer_killed"]


class Part:
    """One process of a run."""

    def __init__(self, name, kind, command, limit_s, mps=False):
        self.name = name
        self.kind = kind  # of the report: tests, experiments, benches, python
        self.command = command
        self.limit_s = limit_s
        self.mps = mps
        self.needs = None  # why it cannot run here
        self.json = None  # file that it writes


class Parts:
    """The parts for a machine, in the order in which they run."""

    def __init__(self, bundle, work, libraries, gpus, quick, old_glibc):
        self.bundle = bundle
        self.work = work
        self.libraries = libraries
        self.gpus = gpus  # how many
        self.quick = quick  # small figures, of fakes
        self.old_glibc = old_glibc  # older than the bundle's

    def __iter__(self):
        """The most valuable parts come first, parts that may harm the others last."""
        yield from self.bench_parts()
        yield from self.experiment_parts(EXPERIMENTS, mps=False)
        yield self.python_part()
        yield from self.test_parts()
        yield from self.experiment_parts(MPS_EXPERIMENTS, mps=True)

    def test_parts(self):
        for name in TESTS:
            yield Part(name, "tests", [self.bundle / "tests" / name, "--gtest_color=no"], 100)

    def experiment_parts(self, names, mps):
        for name in names:
            command = [self.bundle / "experiments" / name]
            part = Part(name + (" with MPS" if mps else ""), "experiments", command, 40, mps)
            if "nccl" in name and self.libraries.nccl is None:
                part.needs = "no NCCL"
            yield part

    def bench_parts(self):
        quick = self.quick
        sizes = ["-b", "64K", "-e", "256K", "-f", "4"] if quick else ["-b", "1M", "-e", "100M"]
        sizes += [] if quick else ["-f", "10"]
        count = ["-n", "2", "-w", "1"] if quick else ["-n", "40", "-w", "5"]
        gpus = self.gpus
        runs = [
            ("two trainers on a GPU", ["allreduce", "--ranks", "2", *sizes, *count]),
            ("four trainers on a GPU", ["allreduce", "--ranks", "4", *sizes, *count]),
            (
                "hand-off",
                ["handoff", "--ranks", "2", *(["-n", "2", "-w", "1"] if quick else ["-n", "200"])],
            ),
        ]
        everyone = ["--ranks", str(gpus), "--gpus", str(gpus)]
        if gpus == 1:
            everyone += ["--impl", "gradsync,nccl"]
        runs.append((f"NCCL, world size {gpus}", ["allreduce", *everyone, *sizes, *count]))
        for name, arguments in runs:
            part = Part(name, "benches", [], 75)
            part.json = self.work / (re.sub(r"\W+", "-", name) + ".json")
            part.command = [
                *(self.bundle / "bench/gradsync_bench.py", *arguments, "--device", "cuda"),
                *("--cuda_library", self.libraries.cuda, "--json", part.json),
            ]
            if self.libraries.nccl:
                part.command += ["--nccl_library", self.libraries.nccl]
            elif "NCCL" in name or "hand-off" in name:
                part.needs = "no NCCL"
            yield part

    def python_part(self):
        part = Part(
            "gradsync.torch",
            "python",
            ["python3", pathlib.Path(__file__).with_name("train_on_gpu.py"), self.bundle],
            60,
        )
        if self.quick:
            part.needs = "PyTorch's CUDA does not run on fakes"
        elif self.old_glibc:
            part.needs = "this machine's Python has an older glibc than libgradsync.so"
        return part
