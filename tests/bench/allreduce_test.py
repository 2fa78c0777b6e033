"""tools/bench/allreduce.py from outside, with small buffers."""

import importlib.util
import json

import pytest
import scripts

# Of gradsync-bench's rows.
KEYS = {
    *("impl", "bytes", "ranks", "dtype", "time_us_p50", "time_us_p99"),
    *("algbw_gbps", "busbw_gbps", "wrong", "cpu_seconds"),
}


@pytest.fixture
def script():
    script = scripts.Script("allreduce.py")
    yield script
    script.close()


def test_compares_what_this_python_has(script, tmp_path):
    done = script.run("--quick", "--json", "rows.json", "--svg", "picture.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    implementations = ["gradsync", "gloo"]
    if importlib.util.find_spec("deepspeed"):
        implementations.append("deepspeed")
    else:
        assert "without deepspeed" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["bytes"], row["impl"]) for row in rows] == [
        (nbytes, implementation) for nbytes in (4096, 65536) for implementation in implementations
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["wrong"] == 0
        assert 0 < row["time_us_p50"] <= row["time_us_p99"]
    texts = scripts.texts_of_svg(tmp_path / "picture.svg")
    assert {"4 KiB", "64 KiB"} <= set(texts)
    assert not script.left_behind()


def test_measures_what_it_is_told_to(script, tmp_path):
    done = script.run(
        *("--sizes", "4,1M", "--ranks", "3", "--impl", "gloo", "-n", "2", "-w", "0"),
        *("--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["bytes"], row["impl"], row["ranks"]) for row in rows] == [
        (4, "gloo", 3),
        (1 << 20, "gloo", 3),
    ]
    assert rows[0]["gradsync_ratio_p50"] is None


def test_says_how_to_use_it(script, tmp_path):
    scripts.check_usage(script, tmp_path)
    for wrong in ("0", "5", "2G", "64X", ""):
        assert script.run("--sizes", wrong, cwd=tmp_path).returncode == 2


def test_leaves_nothing_when_it_is_interrupted(script, tmp_path):
    scripts.check_interrupted(script, tmp_path, "--quick", "--rounds", "100000")
