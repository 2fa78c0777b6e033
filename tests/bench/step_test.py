"""tools/bench/step.py from outside, with tiny models."""

import json

import pytest
import scripts

IMPLEMENTATIONS = ["bare", "ddp_noop", "gradsync", "gradsync_hook", "ddp_group", "ddp_gloo"]
MODELS = ["communication_heavy", "compute_heavy"]


@pytest.fixture
def script():
    script = scripts.Script("step.py")
    yield script
    script.close()


def test_measures_every_implementation_of_every_model(script, tmp_path):
    done = script.run("--quick", "--json", "rows.json", cwd=tmp_path)
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
    assert "target" not in done.stdout
    assert "gradsync: beyond" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert not script.left_behind()


def test_measures_the_named_models_and_implementations(script, tmp_path):
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


def test_compares_hold_with_abort(script, tmp_path):
    done = script.run(
        *("--quick", "--model", "compute_heavy", "--impl", "gradsync,gradsync_hold"),
        *("--rounds", "3", "--steps", "2", "--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "compute_heavy, gradsync_hold: " in done.stdout
    assert " of gradsync's step (quartiles " in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["impl"] for row in rows] == ["gradsync", "gradsync_hold"]
    assert not script.left_behind()


def test_nodes_train_over_their_links(script, tmp_path):
    done = script.run(
        *("--quick", "--model", "balanced", "--impl", "bare,gradsync,ddp_gloo"),
        *("--nodes", "2", "--rate", "1gbit", "--rounds", "1", "--steps", "2"),
        *("--json", "rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    limited = "links of 1gbit" in done.stdout
    assert limited or "--rate is not kept" in done.stdout
    for row in json.loads((tmp_path / "rows.json").read_text()):
        assert (row["ranks"], row["nodes"]) == (4, 2)
        assert row["rate"] == ("1gbit" if limited else None)
        # Two nodes exchange every gradient once.
        assert row["wire_ms"] == (pytest.approx(row["parameters"] * 32e-6) if limited else None)
    assert ("of the larger of computation" in done.stdout) == limited
    assert not script.left_behind()


def test_refuses_nodes_that_it_cannot_have(script, tmp_path):
    for wrong, why in (
        (["--nodes", "3", "--ranks", "3"], "must be 2 to 8 in all"),
        (["--ranks", "1"], "must be 2 to 8 in all"),
        (["--rate", "1gbit"], "needs --nodes 2"),
        (["--nodes", "2", "--impl", "gradsync_hold"], "needs every rank on one node"),
        (["--impl", "gradsync_hold,ddp_gloo"], "hold refuses PyTorch's process groups"),
        (["--nodes", "2", "--rate", "fast"], "not 'fast'"),
    ):
        refused = script.run(*wrong, cwd=tmp_path)
        assert refused.returncode == 2
        assert why in refused.stderr


def test_says_how_to_use_it(script, tmp_path):
    scripts.check_usage(script, tmp_path)


def test_leaves_nothing_when_it_is_interrupted(script, tmp_path):
    scripts.check_interrupted(script, tmp_path, "--quick", "--rounds", "1000")
