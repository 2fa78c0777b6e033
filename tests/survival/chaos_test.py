"""tools/chaos as a user runs it: 25 faults, and the breaks that its chain must show."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile

import pytest

_TREE = pathlib.Path(__file__).resolve().parents[2]
_LIMIT_S = 600
# CPU time of all processes together, with one import of PyTorch.
_CPU_S = 60


@pytest.fixture
def temporary():
    """A folder for temporary files, which must end up empty. Its path is short: sockets lie there.

    No process may outlive the test.
    """
    folder = tempfile.mkdtemp(prefix="chaos-", dir="/tmp")
    yield folder
    left = os.listdir(folder)
    shutil.rmtree(folder)
    assert left == []


def start(temporary, *words):
    return subprocess.Popen(
        [str(_TREE / "tools" / "chaos"), *map(str, words)],
        env={**os.environ, "TMPDIR": temporary},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(temporary, *words):
    """Returns exit status, output and errors."""
    process = start(temporary, *words)
    out, err = process.communicate(timeout=_LIMIT_S)
    print(out, err)
    return process.returncode, out, err


def test_25_faults_change_no_bit_and_every_break_is_seen(temporary, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = tmp_path / "figures.json"
    status, out, err = run(
        temporary, "--seed", 13, "--faults", 25, "--state-mib", 6, "--controls", "--json", path
    )
    assert status == 0, err
    figures = json.loads(path.read_text())
    assert figures["faults"] == 25
    assert figures["equal_chains"] == figures["trainings"] == 1
    assert all(figures["faults_by_phase"].values())
    assert figures["faults_with_a_reduced_and_a_waiting_bucket"] >= 13
    assert figures["faults_by_kind"]["SIGSTOP"] >= 1
    assert figures["faults_by_kind"]["exception"] == 5
    assert figures["faults_of_rank_0"] >= 1
    assert set(figures["breaks_seen"]) == {"unseeded", "buffers", "late", "dropped"}
    assert figures["death_known_ms"]["n"] >= 13
    assert figures["closed_after_exception_known_ms"]["n"] >= 4
    assert figures["failures"] == []
    assert "chains equal to the one without faults: 1 of 1" in out
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu <= _CPU_S, f"{cpu:.0f} s of CPU"


def test_a_break_is_an_exit_status_of_1_that_names_the_first_difference(temporary):
    status, _, err = run(temporary, "--faults", 1, "--phases", "reduced", "--break", "dropped")
    assert status == 1
    assert "the chains differ: rank" in err and "averages differ" in err
    assert "before it: fault 0: rank 0, step 4, one bucket reduced, another waiting" in err


def test_ctrl_c_leaves_nothing_behind(temporary):
    process = start(temporary, "--faults", 25)
    with process:
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(_LIMIT_S) in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such-flag"],
        ["--ranks", "2"],
        ["--faults", "many"],
        ["--faults", "3"],
        ["--phases", "nothing"],
        ["--break", "nothing"],
        ["--keep", "/"],
        ["left over"],
    ],
    ids=lambda words: " ".join(words),
)
def test_wrong_usage_is_refused_before_anything_is_started(temporary, words):
    status, out, err = run(temporary, *words)
    assert (status, out) == (2, "")
    assert words[-1].strip("-") in err


def test_help_teaches(temporary):
    status, out, _ = run(temporary, "--help")
    assert status == 0
    assert "Exit status: 0" in out and "source     a rank, while it sends its state" in out


def test_a_plan_is_shown(temporary):
    status, out, _ = run(temporary, "--plan", "--seed", 4, "--faults", 30)
    assert status == 0
    assert out.count("  fault ") == 30
