"""Predicted against measured."""

import json
import pathlib

import machines
import pytest
from simulate.profile import Refused, load
from simulate.validation import all_reduce_seconds, parse_rate, read_rows, validate

MEASURED = pathlib.Path(__file__).resolve().parents[2] / "tools" / "simulate" / "measured"


def row(**more):
    return {"impl": "gradsync", "bytes": 1 << 20, "ranks": 2, "time_us_p50": 100.0, **more}


@pytest.mark.parametrize(("name", "bound"), [("one-node", 7), ("two-nodes-gloo", 7)])
def test_the_model_says_what_this_machine_did(name, bound):
    result = validate(read_rows(MEASURED / f"{name}.json"), load("this-machine"))
    assert not result.passed_over
    assert result.worst_error < bound
    assert result.median_error < 3


def test_the_model_says_what_two_nodes_did():
    result = validate(read_rows(MEASURED / "two-nodes.json"), load("this-machine"))
    assert {reason.split(": ")[1] for reason in result.passed_over} == {"nothing to predict"}
    assert result.worst_error < 10
    assert result.median_error < 5


def test_a_rows_time_is_taken_apart():
    profile = machines.machine(**machines.DAEMON)
    one = validate([row()], profile).compared[0]
    assert one.predicted == pytest.approx(60 + 20 + 2 * 2 * (1 << 20) / 50e9 * 1e6)
    assert one.measured == 100
    assert one.error == pytest.approx(one.predicted - 100)
    # Two nodes of one rank: three ways between daemons and the exchange, 1 GB/s or what the link
    # leaves.
    exchange = 60 + 1.5 * 100 + 40 + 2 * 50
    free = validate([row(nodes=2)], profile).compared[0]
    assert free.predicted == pytest.approx(exchange + (1 << 20) / 1e9 * 1e6)
    slow = validate([row(nodes=2, rate="1gbit")], profile).compared[0]
    assert slow.predicted == pytest.approx(exchange + (1 << 20) / (1448 / 1514 * 1e9 / 8) * 1e6)
    far = validate([row(nodes=2, rate="1gbit")], profile, one_machine=False).compared[0]
    assert far.predicted == pytest.approx(exchange + (1 << 20) / (0.9415e9 / 8) * 1e6)


def test_namespaces_of_one_machine_share_its_memory():
    profile = machines.machine(**machines.DAEMON)
    rows = [row(nodes=2, ranks=4)]
    shared = validate(rows, profile).compared[0].predicted
    apart = validate(rows, profile, one_machine=False).compared[0].predicted
    assert shared - apart == pytest.approx(2 * 3 * (1 << 20) / 50e9 * 1e6)


def test_sums_and_ways_back_are_exposed_of_one_chunk_alone():
    profile = machines.machine(**machines.DAEMON)
    rows = [row(nodes=2, ranks=4, bytes=8 << 20)]
    whole = validate(rows, profile, one_machine=False).compared[0].predicted
    chunked = profile.with_values({"gradsync.chunk": 2}, "a test")
    chunk = validate(rows, chunked, one_machine=False).compared[0].predicted
    assert whole - chunk == pytest.approx(2 * 3 * (6 << 20) / 50e9 * 1e6)
    # Until memory is slower than the network.
    slow = chunked.with_values({"gradsync.reduce": 1}, "a test")
    bound = 2 * 3 * (8 << 20) / 1e9 * 1e6
    assert validate(rows, slow, one_machine=False).compared[0].predicted > bound


def test_steps_are_predicted_from_the_module_alone():
    def step(impl, ms):
        return {
            "model": "m",
            "impl": impl,
            "step_ms_p50": ms,
            "parameters": 1 << 20,
            "ranks": 2,
        }

    profile = machines.machine(**machines.DAEMON)
    rows = [step("bare", 20.0), step("gradsync", 21.0), step("ddp_gloo", 30.0)]
    result = validate(rows, profile)
    assert len(result.compared) == 1
    assert 20 < result.compared[0].predicted < 21
    assert [text.split(": ")[1] for text in result.passed_over] == [
        "nothing to predict",
        "not in the profile",
    ]
    # DDP without communication, where it was measured, knows more than the bare module.
    more = validate([*rows, step("ddp_noop", 25.0)], profile)
    assert more.compared[0].predicted == pytest.approx(result.compared[0].predicted + 5, rel=0.01)


def test_ranks_may_be_counted_by_node():
    profile = machines.machine(**machines.DAEMON)
    of_all = validate([row(nodes=2, ranks=4)], profile).compared
    assert validate([row(nodes=2, ranks=2)], profile, ranks_per_node=True).compared == of_all


@pytest.mark.parametrize("time", [{"time_us": 100}, {"time_us": {"p50": 100, "p99": 300}}])
def test_times_have_several_names(time):
    renamed = {key: value for key, value in row().items() if key != "time_us_p50"}
    profile = machines.machine(**machines.DAEMON)
    assert validate([{**renamed, **time}], profile) == validate([row()], profile)


def test_other_rows_are_passed_over():
    profile = machines.machine(**machines.DAEMON)
    rows = [row(), row(impl="openmpi"), row(op="broadcast"), row(bytes=64)]
    result = validate(rows, profile, least_bytes=1024)
    assert len(result.compared) == 1
    assert len(result.passed_over) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_us_p50": 0},
        {"time_us_p50": None},
        {"ranks": 3, "nodes": 2},
        {"rate": "fast"},
        {"placement": "upside down", "nodes": 2},
        {"bytes": "many"},
    ],
)
def test_a_row_that_is_no_measurement_is_refused_by_number(wrong):
    profile = machines.machine(**machines.DAEMON)
    with pytest.raises(Refused, match="row 2"):
        validate([row(), row(**wrong)], profile)


def test_nothing_to_compare_is_no_success():
    with pytest.raises(Refused, match="nothing to compare"):
        validate([row(impl="openmpi")], machines.machine(**machines.DAEMON))


@pytest.mark.parametrize("text", ["", "{}", '{"rows": 3}', "[1]", "not JSON"])
def test_files_without_rows_are_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(Refused):
        read_rows(path)


def test_rows_may_stand_alone_or_under_their_name(tmp_path):
    path = tmp_path / "rows.json"
    for content in ([row()], {"about": "x", "rows": [row()]}):
        path.write_text(json.dumps(content))
        assert read_rows(path) == [row()]


def test_rates():
    assert parse_rate("1gbit") == 1
    assert parse_rate("250Mbit") == 0.25
    assert parse_rate("10 gbit") == 10
    assert parse_rate("10") is None


def test_the_daemon_reduces_once_and_sends_once():
    # Four ranks on two nodes send S per node, a ring through all of them 1.5 S.
    profile = load("this-machine").with_values({"link.rate": 1}, "a test")
    ours = all_reduce_seconds(profile, "gradsync", 100e6, [2, 2])
    ring = all_reduce_seconds(profile, "gloo", 100e6, [2, 2])
    assert ring / ours == pytest.approx(1.5, rel=0.03)
