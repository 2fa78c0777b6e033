"""tools/bench/step.py from outside, with tiny models."""

import json

import pytest
import scripts

IMPLEMENTATIONS = ["bare", "ddp_noop", "gradsync", "gradsync_hook", "ddp_gloo"]
MODELS = ["communication_heavy", "compute_heavy"]


@pytest.fixture
def script():
    script = scripts.Script("step.py")
    yield script
    script.close()


def test_measures_every_implementation_of_every_model(script, tmp_path):
    done = script.run("--quick", "--json", "rows.json", "--svg", "picture.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["model"], row["impl"]) for row in rows] == [
        (model, implementation) for model in MODELS for implementation in IMPLEMENTATIONS
    ]
    for row in rows:
        assert 0 < row["step_ms_p10"] <= row["step_ms_p90"]
        assert row["step_ms_p50"] > 0
        assert row["cpu_seconds"] > 0
        assert row["ranks"] == 2
        assert f"  {row['model']:<20} {row['impl']:<14} " in done.stdout
    # The figures of --quick mean nothing.
    assert "reach" not in done.stdout
    assert "gradsync: beyond" in done.stdout
    texts = scripts.texts_of_svg(tmp_path / "picture.svg")
    assert texts.count("DDP + Gloo") == len(MODELS)
    assert str(tmp_path / "picture.svg") in done.stdout
    assert not script.left_behind()


def test_measures_what_it_is_told_to(script, tmp_path):
    done = script.run(
        *("--quick", "--model", "compute_heavy", "--impl", "gradsync,bare"),
        *("--rounds", "1", "--steps", "3", "--turn", "2", "--ranks", "3", "--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["model"], row["impl"], row["ranks"]) for row in rows] == [
        ("compute_heavy", "bare", 3),
        ("compute_heavy", "gradsync", 3),
    ]
    assert rows[0]["of_ddp_gloo"] is None
    assert (tmp_path / "step.svg").exists()


def test_says_how_to_use_it(script, tmp_path):
    scripts.check_usage(script, tmp_path)


def test_leaves_nothing_when_it_is_interrupted(script, tmp_path):
    scripts.check_interrupted(script, tmp_path, "--quick", "--rounds", "1000")
