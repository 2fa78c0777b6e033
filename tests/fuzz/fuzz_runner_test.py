"""tools/checks/fuzz.py, with targets that only say what libFuzzer says."""

import itertools
import json
import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "checks"))

import fuzz  # noqa: E402

# Is executed as often as it may, but at most 100 times. Keeps its arguments in a file beside it.
TARGET = """\
#!/bin/sh
echo "$@" >>"$0.arguments"
echo "$ASAN_OPTIONS" >"$0.environment"
for word; do case $word in -runs=*) runs=${word#-runs=} ;; esac; done
if [ "$runs" -lt 0 ] || [ "$runs" -gt 100 ]; then runs=100; fi
echo "#1 cov: 7 ft: 9"
echo "stat::number_of_executed_units: $runs"
"""


@pytest.fixture
def make_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASAN_OPTIONS", raising=False)
    monkeypatch.setattr(fuzz, "commit_of_tree", lambda: "c0ffee")

    def make(name, text=TARGET):
        target = tmp_path / name
        target.write_text(text)
        target.chmod(0o755)
        return str(target)

    return make


def run(*words):
    return fuzz.main(["--findings=findings", *words])


def rows(capsys):
    """The words of the table's lines, by target."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    return {line[0]: line[1:] for line in lines}


def test_each_target_runs_once_for_its_time(make_target, capsys):
    targets = [make_target(name) for name in ("a_fuzz", "b_fuzz", "c_fuzz")]
    assert run("--seconds=9", "--jobs=2", *targets) == 0
    table = rows(capsys)
    assert sorted(table) == ["a_fuzz", "b_fuzz", "c_fuzz"]
    assert table["a_fuzz"][0] == "100" and table["a_fuzz"][-1] == "7"
    (said,) = pathlib.Path("a_fuzz.arguments").read_text().splitlines()
    assert "-max_total_time=9 -runs=-1 " in said and "-max_len=4096" in said
    assert "quarantine_size_mb=16" in pathlib.Path("a_fuzz.environment").read_text()


def test_limits_of_a_target(make_target):
    assert run(make_target("config_fuzz")) == 0
    assert "-max_len=512" in pathlib.Path("config_fuzz.arguments").read_text()


def test_executions_add_up_until_the_total(make_target, capsys):
    target = make_target("a_fuzz")
    assert run("--until=250", target) == 0
    assert rows(capsys)["a_fuzz"][:2] == ["250", "250"]
    asked = pathlib.Path("a_fuzz.arguments").read_text()
    assert [word for word in asked.split() if word.startswith("-runs=")] == [
        "-runs=250",
        "-runs=150",
        "-runs=50",
    ]
    assert run("--until=300", target) == 0
    assert rows(capsys)["a_fuzz"][:2] == ["50", "300"]
    assert run("--until=300", target) == 0, "nothing is left to do"
    assert rows(capsys)["a_fuzz"][:2] == ["0", "300"]
    totals = json.loads(pathlib.Path("findings/executions.json").read_text())
    assert totals == {"c0ffee": {"a_fuzz": 300}}


def test_another_commit_begins_at_0(make_target, capsys, monkeypatch):
    target = make_target("a_fuzz")
    assert run("--until=100", target) == 0
    monkeypatch.setattr(fuzz, "commit_of_tree", lambda: "beef")
    assert run("--until=100", target) == 0
    totals = json.loads(pathlib.Path("findings/executions.json").read_text())
    assert totals == {"c0ffee": {"a_fuzz": 100}, "beef": {"a_fuzz": 100}}


def test_time_may_end_before_the_total(make_target, capsys, monkeypatch):
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr(fuzz, "time", clock)  # so each slice takes 10 s
    assert run("--until=1000", "--seconds=20", make_target("a_fuzz")) == 3
    assert rows(capsys)["a_fuzz"][:3] == ["200", "200", "20"]


def test_a_target_that_fails_ends_and_the_others_go_on(make_target, capsys):
    failing = make_target("a_fuzz", TARGET + "echo 'Test unit written to x-crash'; exit 77\n")
    assert run("--until=200", failing, make_target("b_fuzz")) == 1
    table = rows(capsys)
    assert table["a_fuzz"][:2] == ["100", "100"] and "x-crash:" in table["a_fuzz"]
    assert table["b_fuzz"][:2] == ["200", "200"]


def test_a_leak_is_found_at_the_end(make_target, capsys):
    leak = "echo 'ERROR: LeakSanitizer: detected memory leaks'; exit 23\n"
    assert run(make_target("a_fuzz", TARGET + leak)) == 1
    assert "leak," in rows(capsys)["a_fuzz"]
    assert pathlib.Path("findings/a_fuzz-leak").is_dir()


@pytest.mark.parametrize("amount", ["--until=100", "--executions=100", "--seconds=9"])
@pytest.mark.parametrize("said", ["", "echo 'stat::number_of_executed_units: 0'\n"])
def test_a_target_that_is_not_executed_has_failed(make_target, capsys, amount, said):
    assert run(amount, make_target("a_fuzz", "#!/bin/sh\n" + said)) == 1
    log = pathlib.Path("findings/a_fuzz.log").absolute()
    assert " ".join(rows(capsys)["a_fuzz"]).endswith(f"FAILED: it was not executed, see {log}")


def test_an_exit_status_says_more_than_that_nothing_was_executed(make_target, capsys):
    assert run(make_target("a_fuzz", "#!/bin/sh\nexit 3\n")) == 1
    assert "FAILED: exit status 3" in " ".join(rows(capsys)["a_fuzz"])


def test_no_executions_cannot_be_asked_for(make_target):
    with pytest.raises(SystemExit) as wrong:
        run("--until=0", make_target("a_fuzz"))
    assert wrong.value.code == 2
