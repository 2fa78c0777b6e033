"""The program from outside."""

import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

_TREE = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = _TREE / "tools" / "simulate" / "simulate"
_MEASURED = _TREE / "tools" / "simulate" / "measured"


def simulate(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, str(_PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
    )


def texts_of_svg(path):
    root = xml.etree.ElementTree.parse(path).getroot()
    return [element.text for element in root.iter() if element.tag.endswith("text")]


def test_run(tmp_path):
    done = simulate(
        *("run", "--gpus", "1-16", "--overlap", "both", "--backend", "nccl,gradsync"),
        *("--json", "rows.json", "--svg", "picture.svg"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 5 * 2 * 2
    by_case = {(row["backend"], row["overlap"], row["gpus"]): row for row in rows}
    for backend in ("nccl", "gradsync"):
        assert by_case[backend, True, 16]["step_ms"] < by_case[backend, False, 16]["step_ms"]
    assert by_case["nccl", True, 16]["nodes"] == 2
    assert {"nccl", "gradsync, no overlap"} <= set(texts_of_svg(tmp_path / "picture.svg"))


def test_one_step_as_a_picture(tmp_path):
    done = simulate("run", "--gpus", 16, "--backend", "gradsync", "--svg", "s.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"backward", "reduce", "exchange"} <= set(texts_of_svg(tmp_path / "s.svg"))


def test_networks_and_rates():
    def step(*network):
        done = simulate("run", "--gpus", 16, "--backend", "nccl", *network)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.splitlines()[-1].split()[3])

    assert step("--network", "1gbit") == pytest.approx(step("--network", "1gbit"))
    assert step("--network", "1gbit") > step("--network", "10gbit") > step()
    assert step("--network", "40gbit") > step("--network", "100gbit-ib")
    assert step("--network", "infinite") < step()


def test_sweep_prints_the_best_bucket_size(tmp_path):
    done = simulate(
        *("sweep", "--gpus", 32, "--backend", "nccl", "--buckets", "0,10,200"),
        *("--json", "s.json", "--svg", "s.svg"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "best for nccl, 32 GPUs: 10 MiB" in done.stdout
    best = json.loads((tmp_path / "s.json").read_text())["best"]["nccl, 32 GPUs"]
    assert best["bucket_mb"] == 10
    assert best["within_2_percent"] == [10]
    assert "200" in texts_of_svg(tmp_path / "s.svg")


def test_paper(tmp_path):
    done = simulate("paper", "--json", "p.json", "--svg", "p.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "p.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == [
        *("overlap", "buckets-16", "buckets-32", "scale", "skip", "round-robin", "published"),
    ]
    assert sum(not statement["holds"] for statement in content["statements"]) == 1
    assert "Fig. 9: scaling, 25 MiB buckets" in texts_of_svg(tmp_path / "p.svg")


def test_validate(tmp_path):
    measured = _MEASURED / "one-node.json"
    done = simulate(
        "validate", "--measured", measured, "--bound", 10, "--json", "v.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "v.json").read_text())
    assert f"largest {content['worst_error_percent']:.1f} %" in done.stdout
    done = simulate(
        "validate", "--measured", measured, "--bound", 5, "--svg", "v.svg", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "more than 5 %" in done.stderr
    assert (tmp_path / "v.svg").exists()


def test_profiles_state_their_sources():
    listed = simulate("profiles").stdout
    for name in ("paper", "dgx1", "this-machine", "10gbit", "infinite"):
        assert f"  {name} " in listed
    for name in ("paper", "1gbit"):
        done = simulate("profiles", name)
        assert done.returncode == 0
        assert "link.rate = " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["run", "--model", "vgg"],
        ["run", "--gpus", "0"],
        ["run", "--gpus", "3-3"],
        ["run", "--gpus", "8", "--backend", "mpi"],
        ["run", "--gpus", "8", "--network", "morse"],
        ["run", "--gpus", "8", "--profile", "nowhere"],
        ["run", "--gpus", "8", "--model", "bert-base"],
        ["run", "--gpus", "8", "--slow-rank", "8:2"],
        ["run", "--gpus", "8", "--compute-ms", "0"],
        ["run", "--gpus", "1", "--json", "/nowhere/x.json"],
        ["run", "--bucket-mb", "-1"],
        ["sweep", "--buckets", "1,,2"],
        ["validate"],
        ["validate", "--measured", "/nowhere"],
    ],
)
def test_wrong_usage(arguments):
    done = simulate(*arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr


@pytest.mark.parametrize("command", ["", "run", "sweep", "paper", "validate", "profiles"])
def test_help(command):
    done = simulate(*command.split(), "--help")
    assert done.returncode == 0
    assert "usage: simulate" in done.stdout
