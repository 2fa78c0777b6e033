"""tools/gpu_bundle and tools/gpu_check from beginning to end, on fake GPUs: what they run and what
they report. On fakes the measured figures mean nothing.
"""

import json
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest

# Bazel runs this in a folder of links to the files of the tree.
TREE = pathlib.Path(__file__).parents[2]
EXPERIMENTS = {
    "cuda_mapping_survival",
    "cuda_overlap",
    "cuda_overlap with MPS",
    "nccl_abort_parked",
    "cuda_pid_namespace_import",
    "cuda_shared_words",
    "cuda_shared_words with MPS",
    "cuda_busy_mps_trainer_killed with MPS",
}


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


def check(bundle, out, *arguments, faults=None):
    """Runs gpu_check. Returns the ended process, the JSON report and the Markdown report."""
    environment = {"PATH": "/usr/bin:/bin"}
    if faults:
        environment["GRADSYNC_FAKE_CUDA_FAULTS"] = faults
    done = subprocess.run(
        [TREE / "tools/gpu_check", "--fakes", "--bundle", bundle, "--out", out, *arguments],
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


def test_bundle_has_all_that_a_bare_machine_lacks(bundle, tmp_path):
    with tarfile.open(bundle) as archive:
        names = {name.removeprefix("gradsync-gpu/") for name in archive.getnames()}
        archive.extractall(tmp_path)
    assert {"gpu_check", "bin/gradsyncd", "bin/gradsyncctl", "bin/bench-rank"} <= names
    assert "bench/gradsync_bench.py" in names
    assert {"python/gradsync/libgradsync.so", "python/gradsync/torch/__init__.py"} <= names
    assert "tests/cuda_job_test" in names
    assert not any(re.match(r"lib/(libcuda|libnccl|libc\.so|ld-linux)", name) for name in names)
    for program in ("bin/gradsyncd", "bin/bench-rank", "python/gradsync/libgradsync.so"):
        needed = subprocess.run(
            ["ldd", tmp_path / "gradsync-gpu" / program], capture_output=True, text=True
        ).stdout
        assert "not found" not in needed
        # It is the library of the bundle, not that of this machine.
        assert str(tmp_path) in re.search(r"libgrpc\S* => (\S+)", needed)[1]
        symbols = subprocess.run(
            ["readelf", "-S", tmp_path / "gradsync-gpu" / program], capture_output=True, text=True
        ).stdout
        assert ".debug_info" not in symbols


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


def test_report_of_a_whole_run_has_every_part(bundle, tmp_path):
    done, report, text = check(bundle, tmp_path / "reports", "--fake-gpus", "2")
    assert next(iter(report)) == "not_a_measurement"
    assert text.splitlines()[0].startswith("**Not a measurement")
    assert report["complete"]
    assert report["machine"]["gpus"][0]["uuid"].startswith("GPU-")
    assert report["machine"]["nccl"] == "2.28.9"
    for kind in ("targets", "experiments", "tests", "benches", "python"):
        assert f"## {kind.title()}" in text or kind == "python"

    assert set(verdicts(report, "experiments")) == EXPERIMENTS
    # Fakes have no speed, so they cannot show whether kernels overlap.
    assert set(
        verdict
        for name, verdict in verdicts(report, "experiments").items()
        if "overlap" not in name and "namespace" not in name
    ) == {"holds"}
    assert verdicts(report, "experiments")["cuda_pid_namespace_import"] in (
        "holds",
        "not available",
    )
    for test in report["tests"]:
        # The tests themselves may fail: this test checks only that the verdict fits.
        assert test["verdict"] == ("failed" if test["failed"] else "passed"), test
        assert test["passed"], test
    assert set(verdicts(report, "benches").values()) == {"measured"}
    for bench in report["benches"]:
        assert bench["figures"] and bench["table"].startswith("#")
    assert [result["verdict"] for result in report["python"]] == ["not available"]

    values = [row["value"] for row in report["targets"]]
    assert len(values) == 3 and None not in values
    assert report["targets"][2]["value"] == 0
    for row in report["targets"]:
        assert row["verdict"] in ("met", "missed")


def test_failing_experiment_is_reported_as_failed(bundle, tmp_path):
    done, report, text = check(
        bundle,
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
    failed = report["experiments"][0]
    assert "signal" in failed["why"] or "exit status" in failed["why"]
    assert "CUDA_ERROR_UNKNOWN" in failed["output"]
    assert "| cuda_mapping_survival | failed |" in text
    # Targets of benches that did not run are unmeasured.
    assert {row["verdict"] for row in report["targets"]} == {"unmeasured"}


def test_hanging_program_is_killed_and_its_facts_are_kept(bundle, tmp_path):
    done, report, _ = check(
        bundle,
        tmp_path,
        "--only",
        "cuda_shared_words,cuda_shared_words with MPS",
        "--limit",
        "6",
        faults="cuMemHostRegister_v2 1+ hang",
    )
    assert done.returncode == 1
    found = {result["name"]: result for result in report["experiments"]}
    assert "no end within" in found["cuda_shared_words"]["why"]
    assert found["cuda_shared_words"]["facts"] == {"mps": False}
    assert found["cuda_shared_words with MPS"]["verdict"] == "not run"


def test_help_exits_with_0_and_wrong_usage_with_2(bundle, tmp_path):
    def run(*arguments):
        return subprocess.run(
            [TREE / "tools/gpu_check", *arguments], capture_output=True, text=True, timeout=60
        )

    assert run("--help").returncode == 0
    assert "--fakes" in run("--help").stdout
    assert run("--no-such-flag").returncode == 2
    assert run().returncode == 2
