"""The parts of a run: their programs, arguments, time limits and order."""

import glob
import pathlib
import re
import shutil

# Two tests that launch every kind of kernel, for compute-sanitizer.
SANITIZED = "CudaLaunch.AveragesOverTheTrainersOfAGpu:CudaLaunch.SumsSixteenBitTypesInFloat32"
# PyTorch's imports take up to 150 s where its files have never been read.
IMPORT_S = 150


class Part:
    """One program of a run."""

    def __init__(self, name, kind, command, limit_s, mps=False, shards=1):
        self.name = name
        self.kind = kind  # of the report: tests, experiments, benches, python
        self.command = command
        self.limit_s = limit_s
        self.mps = mps
        self.shards = shards  # processes of googletest beside each other, at most
        self.needs = None  # why it cannot run here
        self.not_on_fakes = None  # why it cannot run on fakes
        self.of_speed = False  # it runs on fakes, but they have no speed
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
        """What is cheap and decides most comes first, what may harm other parts last."""
        yield self.test("cuda_start_test")
        yield self.experiment("cuda_shared_words")
        yield self.experiment("cuda_mapping_survival")
        yield self.test("cuda_launch_test", shards=4)
        yield self.python("gradsync.torch", "train_on_gpu.py", "python")
        yield self.experiment("nccl_two_ranks")
        yield self.test("nccl_launch_test", shards=4)
        yield self.test("cuda_nodes_test", shards=4)
        yield self.test("cuda_wire_test", shards=2)
        yield self.experiment("nccl_abort_parked")
        yield self.test("cuda_layout_test", shards=4)
        yield self.test("cuda_job_test", shards=4)
        yield self.test("cuda_death_test", shards=4)
        yield self.python("torch_deaths", "torch_deaths.py", "experiments")
        yield self.experiment("cuda_pid_namespace_import")
        yield self.sanitizer()
        yield from self.benches()
        yield self.experiment("cuda_overlap")
        yield from self.benches(mps=True)
        yield self.experiment("cuda_overlap", mps=True)
        yield self.experiment("cuda_shared_words", mps=True)
        yield self.experiment("nccl_two_ranks", mps=True)
        yield self.experiment("cuda_busy_mps_trainer_killed", mps=True)

    def test(self, name, shards=1):
        command = [self.bundle / "tests" / name, "--gtest_color=no"]
        part = Part(name, "tests", command, 120, shards=shards)
        if self.libraries.nccl is None and name not in ("cuda_launch_test", "cuda_layout_test"):
            part.needs = "no NCCL"
        return part

    def experiment(self, name, mps=False):
        command = [self.bundle / "experiments" / name]
        part = Part(name + (" with MPS" if mps else ""), "experiments", command, 40, mps)
        if "nccl" in name and self.libraries.nccl is None:
            part.needs = "no NCCL"
        if name == "cuda_overlap":
            part.of_speed = True
        return part

    def sanitizer(self):
        found = shutil.which("compute-sanitizer") or next(
            iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), None
        )
        command = [found, "--target-processes=all", "--error-exitcode=99"]
        command += [self.bundle / "tests/cuda_launch_test", f"--gtest_filter={SANITIZED}"]
        part = Part("compute-sanitizer", "tests", command, 90)
        part.not_on_fakes = "fakes have no kernels of a GPU"
        if found is None and not self.quick:
            part.needs = "compute-sanitizer does not exist"
        return part

    def benches(self, mps=False):
        quick = self.quick
        sizes = ["-b", "64K", "-e", "256K", "-f", "4"] if quick else ["-b", "1M", "-e", "100M"]
        sizes += [] if quick else ["-f", "10"]
        count = ["-n", "2", "-w", "1"] if quick else ["-n", "40", "-w", "5"]
        runs = [
            (
                "hand-off",
                ["handoff", "--ranks", "2", *(["-n", "2", "-w", "1"] if quick else ["-n", "200"])],
            ),
            ("two trainers on a GPU", ["allreduce", "--ranks", "2", *sizes, *count]),
            ("four trainers on a GPU", ["allreduce", "--ranks", "4", *sizes, *count]),
        ]
        if mps:
            runs.pop()
        elif self.gpus > 1:
            everyone = ["--ranks", str(self.gpus), "--gpus", str(self.gpus)]
            runs.append((f"NCCL on {self.gpus} GPUs", ["allreduce", *everyone, *sizes, *count]))
        else:
            one = ["--ranks", "1", "--impl", "gradsync,nccl", "-b", "1M", "-e", "1M"]
            runs.append(
                (
                    "NCCL with one rank, which launches nothing",
                    ["allreduce", *one, "-n", "2", "-w", "1"],
                )
            )
        for name, arguments in runs:
            name += " with MPS" if mps else ""
            part = Part(name, "benches", [], 75, mps)
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

    def python(self, name, script, kind):
        path = pathlib.Path(__file__).with_name(script)
        part = Part(name, kind, ["python3", path, self.bundle], IMPORT_S + 60)
        part.not_on_fakes = "PyTorch's CUDA does not run on fakes"
        if self.old_glibc and not self.quick:
            part.needs = "this machine's Python has an older glibc than libgradsync.so"
        return part
