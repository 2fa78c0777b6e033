"""gradsync-bench's ranks that are Python programs, with small buffers."""

import importlib.util
import json
import re

import pytest
import scripts


@pytest.fixture
def script():
    script = scripts.Script("gradsync_bench.py")
    yield script
    script.close()


def test_python_implementations_sum(script, tmp_path):
    names = ["gradsync_py", "gradsync_group", "gloo_py"]
    if importlib.util.find_spec("deepspeed"):
        names.append("deepspeed")
    done = script.run(
        *("allreduce", "--impl", ",".join(["gradsync", *names]), "--ranks", "3"),
        *("-b", "4", "-e", "64K", "-f", "16384", "-n", "3", "-w", "1", "--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["bytes"], row["impl"]) for row in rows] == [
        (nbytes, name) for nbytes in (4, 65536) for name in ["gradsync", *names]
    ]
    for row in rows:
        assert row["ranks"] == 3
        assert row["wrong"] == 0
        assert 0 < row["time_us_p10"] <= row["time_us_p50"] <= row["time_us_p99"]
    for name in ("gradsync_py", "gradsync_group"):
        assert re.search(rf"{name} is [^,]* times as fast as gloo_py", done.stdout)
    assert not script.left_behind()


@pytest.mark.parametrize("command", ["allgather", "reducescatter"])
def test_process_groups_have_the_other_collectives(script, tmp_path, command):
    done = script.run(
        *(command, "--ranks", "3", "-b", "12", "-e", "48K", "-f", "4096", "-n", "3", "-w", "1"),
        *("--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["bytes"], row["impl"], row["wrong"]) for row in rows] == [
        (nbytes, name, 0) for nbytes in (12, 49152) for name in ("gradsync_group", "gloo_py")
    ]
    assert {row["collective"].replace("_", "") for row in rows} == {command}
    assert "gradsync_group is" in done.stdout
    assert not script.left_behind()


def test_missing_deepspeed_is_named(script, tmp_path):
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("this Python has DeepSpeed")
    done = script.run("allreduce", "--impl", "deepspeed", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no DeepSpeed" in done.stderr
