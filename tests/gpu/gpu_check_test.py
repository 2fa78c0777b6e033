"""tools/gpu_bundle and tools/gpu_check from beginning to end, on fake GPUs: what they run and what
they report. On fakes the measured figures mean nothing.
"""

import json
import pathlib
import random
import re
import subprocess
import sys
import tarfile

import pytest

# Bazel runs this in a folder of links to the files of the tree.
TREE = pathlib.Path(__file__).parents[2]
# Some of every kind. The suite runs the other tests and benches by themselves.
TESTS = ["cuda_start_test", "cuda_launch_test", "cuda_wire_test"]
EXPERIMENTS = [
    "cuda_shared_words",
    "cuda_mapping_survival",
    "nccl_abort_parked",
    "cuda_pid_namespace_import",
    "cuda_shared_words with MPS",
    "cuda_overlap with MPS",
    "cuda_busy_mps_trainer_killed with MPS",
]
BENCHES = ["hand-off", "two trainers on a GPU"]
WITHOUT_FAKES = ["gradsync.torch", "torch_deaths", "compute-sanitizer"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    archive = tmp_path_factory.mktemp("bundle") / "gradsync-gpu.tar.gz"
    made = subprocess.run(
        [TREE / "tools/gpu_bundle", "--fakes", "--bin", TREE, "--output", archive],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    assert re.search(r"gradsync-gpu\.tar\.gz \([0-9.]+ MB\)", made.stdout)
    assert archive.stat().st_size <= 60 << 20
    return archive


@pytest.fixture(scope="module")
def unpacked(bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(bundle) as archive:
        archive.extractall(folder)
    return folder / "gradsync-gpu"


def check(unpacked, out, *arguments, faults=None):
    """Runs gpu_check as a machine with GPUs does. Returns the ended process and both reports."""
    environment = {"PATH": "/usr/bin:/bin", "OUT": str(out)}
    if faults:
        environment["GRADSYNC_FAKE_CUDA_FAULTS"] = faults
    done = subprocess.run(
        [unpacked / "gpu_check", "--fakes", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout, done.stderr)
    report = json.loads((out / "fakes.json").read_text())
    return done, report, (out / "fakes.md").read_text()


def verdicts(report, kind):
    return {result["name"]: result["verdict"] for result in report[kind]}


def logs_of(out):
    """The names of all packed logs, and their texts."""
    texts = {}
    for path in out.glob("logs*.tar.gz"):
        with tarfile.open(path) as archive:
            for name in archive.getnames():
                texts[name] = archive.extractfile(name).read().decode(errors="replace")
    return texts


def test_bundle_has_all_that_a_bare_machine_lacks(unpacked):
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert {"gpu_check", "bin/gradsyncd", "bin/gradsyncctl", "bin/bench-rank"} <= names
    assert "bench/gradsync_bench.py" in names
    assert {"python/gradsync/libgradsync.so", "python/gradsync/torch/__init__.py"} <= names
    assert "tests/cuda_job_test" in names
    assert not any(re.match(r"lib/(libcuda|libnccl|libc\.so|ld-linux)", name) for name in names)
    for program in ("bin/gradsyncd", "bin/bench-rank", "python/gradsync/libgradsync.so"):
        needed = subprocess.run(["ldd", unpacked / program], capture_output=True, text=True).stdout
        assert "not found" not in needed
        # It is the library of the bundle, not that of this machine.
        assert str(unpacked) in re.search(r"libgrpc\S* => (\S+)", needed)[1]
        symbols = subprocess.run(
            ["readelf", "-S", unpacked / program], capture_output=True, text=True
        ).stdout
        assert ".debug_info" not in symbols


def test_bundle_has_the_whole_python_package(unpacked):
    said = subprocess.run(
        [sys.executable, "-c", "import gradsync.torch; print(gradsync.torch.__file__)"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(unpacked / "python")},
        capture_output=True,
        text=True,
    )
    assert said.stdout.startswith(str(unpacked)), said.stderr


def test_bundled_glibc_can_replace_that_of_the_machine(bundle, tmp_path):
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path)
    unpacked = tmp_path / "gradsync-gpu"
    version = json.loads((unpacked / "bundle.json").read_text())["glibc"]
    sys.path.insert(0, str(unpacked / "gpu"))
    import own_glibc

    own_glibc.use(unpacked, version)
    said = subprocess.run(
        [unpacked / "bin/gradsyncd", "--help"],
        env={"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded")},
        capture_output=True,
    )
    assert said.returncode == 0, said.stderr
    (loaded,) = tmp_path.glob("loaded.*")
    assert re.search(rf"calling init: {unpacked}/.*glibc/libc\.so\.6", loaded.read_text())


def test_every_part_has_its_program_in_the_bundle(unpacked, tmp_path):
    sys.path.insert(0, str(unpacked / "gpu"))
    from driver_libraries import DriverLibraries
    from parts import Parts

    libraries = DriverLibraries("/libcuda.so.1", "/libnccl.so.2")
    for gpus in (1, 2):
        parts = list(Parts(unpacked, tmp_path, libraries, gpus, quick=False, old_glibc=False))
        kinds = [part.kind for part in parts]
        # Benches come after all tests without MPS, and MPS comes last.
        assert kinds.index("benches") > max(i for i, kind in enumerate(kinds) if kind == "tests")
        first_mps = next(i for i, part in enumerate(parts) if part.mps)
        assert all(part.mps for part in parts[first_mps:])
        for part in parts:
            for word in part.command:
                if str(word).startswith(str(unpacked)):
                    assert pathlib.Path(word).exists(), part.name


def test_report_has_the_results_of_every_kind_of_part(unpacked, tmp_path):
    out = tmp_path / "out"
    only = [*TESTS, *EXPERIMENTS, *BENCHES, *WITHOUT_FAKES]
    done, report, text = check(unpacked, out, "--only", ",".join(only))
    # All that fakes can show is as expected.
    assert done.returncode == 0, done.stdout
    assert next(iter(report)) == "not_a_measurement"
    assert text.splitlines()[0].startswith("**Not a measurement")
    assert report["complete"]
    assert report["machine"]["gpus"][0]["uuid"].startswith("GPU-")
    assert report["machine"]["nccl"] == "2.28.9"
    assert report["packages"]["python"]
    for kind in ("targets", "experiments", "tests", "benches"):
        assert f"## {kind.title()}" in text

    results = {
        row["name"]: row
        for kind in ("tests", "experiments", "benches", "python")
        for row in report[kind]
    }
    assert sorted(results) == sorted(only)
    for name in WITHOUT_FAKES:
        assert results[name]["verdict"] == "not applicable"
        assert f"not applicable: {name}" in done.stdout
    for name in EXPERIMENTS:
        if name == "cuda_overlap with MPS" and results[name]["verdict"] == "not applicable":
            assert results[name]["why"] == "fakes have no speed"
            continue
        # A sandbox may forbid namespaces.
        if name != "cuda_pid_namespace_import" or results[name]["verdict"] != "not available":
            assert results[name]["verdict"] == "holds", results[name]
    for name in TESTS:
        assert results[name]["verdict"] == "passed", results[name]
        assert results[name]["passed"], name
    # NCCL's tests of two GPUs, on one.
    assert "WireType.RoundsFloatsBetweenNodesWithOneGpu" in results["cuda_wire_test"]["passed"]
    assert (
        "CudaStart.FullGpuIsRefusedWithItsFreeBytes"
        in (results["cuda_start_test"]["passed_in_part"])
    )
    for name in BENCHES:
        assert results[name]["verdict"] == "measured", results[name]
        assert results[name]["figures"] and results[name]["table"].startswith("#")

    values = [row["value"] for row in report["targets"]]
    assert len(values) == 3 and None not in values
    assert report["targets"][2]["value"] == 0
    assert [row["verdict"] for row in report["targets"]] == [
        "not applicable",
        "not applicable",
        "met",
    ]

    # What a machine gives back: few files, none in a deep folder.
    assert sorted(path.name for path in out.iterdir()) == ["fakes.json", "fakes.md", "logs.tar.gz"]
    assert report["logs_left_out"] == []
    logs = logs_of(out)
    assert any(re.fullmatch(r"logs/\d+-cuda-wire-test/gradsyncd-.*\.log", name) for name in logs)
    (start,) = [logs[name] for name in logs if "-cuda-start-test/" in name]
    assert "[ RUN      ] CudaStart." in start


def test_logs_that_are_too_large_for_one_archive_fill_several(unpacked, tmp_path):
    sys.path.insert(0, str(unpacked / "gpu"))
    import logs as module

    logs = module.Logs(tmp_path / "logs", archive_bytes=16 << 10)
    for part in range(3):
        folder = logs.start_part(f"part {part}")
        (folder / "output.log").write_bytes(random.Random(part).randbytes(9 << 10))
    (logs.start_part("huge") / "output.log").write_bytes(random.Random(9).randbytes(17 << 10))
    (tmp_path / "out").mkdir()
    assert logs.pack(tmp_path / "out") == ["04-huge/output.log"]
    assert len(logs_of(tmp_path / "out")) == 3
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_failing_experiment_is_reported_as_failed(unpacked, tmp_path):
    done, report, text = check(
        unpacked,
        tmp_path,
        "--only",
        "cuda_mapping_survival,cuda_shared_words",
        faults="cuMemImportFromShareableHandle 1 error 999",
    )
    assert done.returncode == 1
    assert verdicts(report, "experiments") == {
        "cuda_mapping_survival": "failed",
        "cuda_shared_words": "holds",
    }
    failed = next(row for row in report["experiments"] if row["verdict"] == "failed")
    assert "signal" in failed["why"] or "exit status" in failed["why"]
    assert "CUDA_ERROR_UNKNOWN" in failed["output"]
    assert "| cuda_mapping_survival | failed |" in text
    # Targets of benches that did not run are unmeasured.
    assert {row["verdict"] for row in report["targets"]} == {"unmeasured"}


def test_hanging_program_is_killed_and_its_facts_are_kept(unpacked, tmp_path):
    done, report, _ = check(
        unpacked,
        tmp_path,
        "--only",
        "cuda_shared_words,cuda_shared_words with MPS",
        "--limit",
        "10",
        faults="cuMemHostRegister_v2 1+ hang",
    )
    assert done.returncode == 1
    found = {result["name"]: result for result in report["experiments"]}
    assert "no end within" in found["cuda_shared_words"]["why"]
    assert found["cuda_shared_words"]["facts"] == {"mps": False}
    assert found["cuda_shared_words with MPS"]["verdict"] == "not run"


def test_help_exits_with_0_and_wrong_usage_with_2():
    def run(*arguments):
        return subprocess.run(
            [TREE / "tools/gpu_check", *arguments], capture_output=True, text=True, timeout=60
        )

    assert run("--help").returncode == 0
    assert "--fakes" in run("--help").stdout
    assert run("--no-such-flag").returncode == 2
    assert run().returncode == 2
