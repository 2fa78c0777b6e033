"""The program from outside."""

import pathlib
import subprocess
import sys

import pytest

_PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "tools" / "simulate" / "simulate"


def simulate(*arguments):
    return subprocess.run(
        [sys.executable, str(_PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def best_step(*arguments):
    """Milliseconds of 25 MiB buckets, 16 GPUs, on NCCL."""
    done = simulate("sweep", "--gpus", 16, "--backend", "nccl", "--buckets", 25, *arguments)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split("MiB, ")[1].split()[0])


def test_sweep_recommends_a_bucket_size():
    done = simulate("sweep", "--gpus", 32, "--backend", "nccl", "--buckets", "0,10,200")
    assert done.returncode == 0, done.stderr
    assert "best for nccl, 32 GPUs: 10 MiB" in done.stdout
    assert "(within 2 %: 10)" in done.stdout


def test_sweep_takes_a_network_a_machine_and_a_time():
    assert best_step("--network", "1gbit") == best_step("--network", "1000mbit")
    assert best_step("--network", "1gbit") > best_step("--network", "10gbit") > best_step()
    assert best_step("--compute-ms", 1000) > best_step() + 800
    assert best_step("--ranks-per-node", 16) < best_step("--ranks-per-node", 1)
    assert "best for gloo" in simulate("sweep", "--gpus", 2, "--buckets", 25).stdout
    done = simulate("sweep", "--gpus", 2, "--profile", "this-machine", "--compute-ms", 100)
    assert "best for gradsync, 2 GPUs" in done.stdout


def test_paper_prints_every_figure_and_statement():
    done = simulate("paper")
    assert done.returncode == 0, done.stderr
    for figure in (6, 7, 8, 9, 10, 12):
        assert f"\nFig. {figure}: " in "\n" + done.stdout
    assert "yes  Fig. 6: overlap gains 38.0 % for resnet50 on nccl" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["sweep", "--model", "vgg"],
        ["sweep", "--gpus", "0"],
        ["sweep", "--backend", "mpi"],
        ["sweep", "--network", "morse"],
        ["sweep", "--profile", "nowhere"],
        ["sweep", "--model", "bert-base"],
        ["sweep", "--compute-ms", "0"],
        ["sweep", "--buckets", "1,,2"],
        ["sweep", "--buckets", "-1"],
        ["paper", "--figure", "6"],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    done = simulate(*arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr


@pytest.mark.parametrize("command", ["", "sweep", "paper"])
def test_help_exits_with_0(command):
    done = simulate(*command.split(), "--help")
    assert done.returncode == 0
    assert "usage: simulate" in done.stdout
