"""gradsync-bench from outside: what it prints, writes and returns, and what it leaves behind."""

import collections
import json
import signal

import pytest
import scripts


@pytest.fixture
def bench(tmp_path):
    """Runs it; a test that ends with a process or a file left behind fails."""
    script = scripts.Script("gradsync_bench.py")

    def run(*arguments, status=0):
        done = script.run(*arguments, "--json", "figures.json", cwd=tmp_path)
        assert done.returncode == status, done.stderr
        if not (tmp_path / "figures.json").exists():
            return done, None
        return done, json.loads((tmp_path / "figures.json").read_text())

    yield run
    assert not script.left_behind()
    script.close()


def _rows(figures):
    return dict(collections.Counter(row["impl"] for row in figures))


def test_every_implementation_averages(bench):
    done, figures = bench(*"allreduce -b 4K -e 1M -f 16 -n 3 -w 1".split())
    for row in figures:
        assert len(row) == 17
        assert (row["ranks"], row["dtype"], row["wrong"]) == (2, "float32", 0)
        for key in (
            *(
                "time_us_p10",
                "time_us_p50",
                "time_us_p99",
                "algbw_gbps",
                "busbw_gbps",
                "cpu_seconds",
            ),
            *("roofline_ratio_p50", "roofline_ratio_p10"),
        ):
            assert row[key] > 0, (key, row)
    # 4K, 64K, 1M; Open MPI where it is installed.
    everybody = {"roofline": 3, "gradsync": 3, "gloo": 3, "openmpi": 3}
    if "without openmpi" in done.stdout:
        del everybody["openmpi"]
    assert _rows(figures) == everybody
    for head in (
        *("size", "count", "type", "impl", "time p10", "p50", "algbw", "busbw", "#wrong", "ratio"),
        *("cores", "times as fast as gloo"),
    ):
        assert head in done.stdout


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_every_type_averages_over_an_odd_number_of_busy_ranks(bench, dtype):
    _, figures = bench(
        *"allreduce -b 60000 -e 60000 -n 2 -w 1 --ranks 3 --busy --dtype".split(), dtype
    )
    assert figures
    for row in figures:
        assert (row["ranks"], row["dtype"], row["wrong"]) == (3, dtype, 0)


def test_nodes_average_over_their_links(bench):
    """The nodes are loopback addresses where namespaces cannot be made; the bench says so."""
    done, figures = bench(*"allreduce --nodes 2 --rate 1gbit -b 64K -e 64K -n 3 -w 1".split())
    limited = "links of 1gbit" in done.stdout
    for row in figures:
        assert (row["ranks"], row["nodes"], row["wrong"]) == (4, 2, 0)
        assert row["roofline_ratio_p50"] is None
        assert (row["wire_utilisation"] is not None) == limited
        assert row["rate"] == ("1gbit" if limited else None)
    assert _rows(figures) == {"gradsync": 1, "gloo": 1}
    assert ("2 network namespaces" if limited else "--rate is not kept") in done.stdout
    assert "times as fast as gloo" in done.stdout


def test_handoff_measures_the_way_through_the_coordinator(bench):
    _, figures = bench(*"handoff --nodes 3 --ranks 1 -n 3 -w 1".split())
    assert (figures["ranks"], figures["nodes"]) == (3, 3)
    assert figures["ready_to_done_us_p50"] > 0


def test_handoff_measures_the_empty_bucket(bench):
    done, figures = bench(*"handoff -n 5 -w 1".split())
    assert [bucket["bytes"] for bucket in figures["buckets"]] == [0, 64 << 10, 256 << 10, 1 << 20,
                                                                  25 << 20]  # fmt: skip
    for measured in (figures, *figures["buckets"]):
        for call in ("mark_ready", "ready_to_done"):
            assert 0 < measured[f"{call}_us_p50"] <= measured[f"{call}_us_p99"]
    assert "MarkReady" in done.stdout


def test_wrong_elements_are_counted_and_fail(bench):
    arguments = "allreduce -b 1M -e 1M -n 3 -w 2 --impl roofline,faulty"
    done, figures = bench(*arguments.split(), status=1)
    assert "12 elements were wrong" in done.stderr
    # One per rank and iteration, also of the one that wakes the processes.
    assert [(row["impl"], row["wrong"]) for row in figures] == [("roofline", 0), ("faulty", 12)]


def test_wrong_usage_exits_with_2(bench):
    for arguments, named in (
        ("handoff --daemon /no/such/daemon", "/no/such/daemon"),
        ("allreduce --no-such-flag", "--no-such-flag"),
        ("handoff --json /no/such/folder/x.json", "/no/such/folder/x.json"),
    ):
        done, _ = bench(*arguments.split(), status=2)
        assert named in done.stderr
    for arguments, taught in (("--help", "allreduce"), ("allreduce --help", "roofline")):
        assert taught in bench(*arguments.split())[0].stdout


def test_failures_exit_with_1_and_say_why(bench):
    done, _ = bench("handoff", "--daemon", "/bin/false", status=1)
    assert "gradsyncd (pid " in done.stderr and "exited with code 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_bench(tmp_path, number):
    """The bench is interrupted or killed while every rank is at work."""
    script = scripts.Script("gradsync_bench.py")
    process = script.start(*"allreduce -b 1M -e 1M -n 1000000".split(), cwd=tmp_path)
    with process:
        assert any("1M: " in line for line in iter(process.stdout.readline, "")), "it never began"
        process.send_signal(number)
        assert process.wait(60) == (-9 if number == signal.SIGKILL else 130)
    script.await_processes()
    if number != signal.SIGKILL:
        assert not script.left_behind()
    script.close()
