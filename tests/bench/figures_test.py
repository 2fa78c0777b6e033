"""What the benchmarks make of times that are known."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"))

import collective_report
import gradsync_bench
import handoff_report
import step_report
import units
from collective_report import Run
from contest import Score, Turn
from quantile import median, quantile


def test_quantiles_are_samples_and_the_median_is_in_the_middle():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert quantile(range(1, 101), 0.9) == 90
    assert quantile([5], 0.1) == 5


def test_sizes_are_powers_of_two():
    for text, number in (("4", 4), ("64K", 65536), ("25M", 25 << 20), ("1G", 1 << 30)):
        assert units.parse_byte_size(text) == number
        assert units.format_byte_size(number) == text
    assert units.format_byte_size(1536 << 10) == "1536K"
    for wrong in ("", "0", "K", "-1", "+1", " 1", "1 ", "1.5M", "64k", "1KB", "1MM", "0x10"):
        with pytest.raises(ValueError, match="is no size"):
            units.parse_byte_size(wrong)


def test_the_largest_size_is_measured_even_between_two_factors():
    assert gradsync_bench.sizes(64, 1000, 4) == [64, 256, 1000]
    assert gradsync_bench.sizes(64, 256, 4) == [64, 256]
    assert gradsync_bench.sizes(64, 64, 4) == [64]


# ---- gradsync-bench ----


def score(name, *times_us, **more):
    """Each time belongs to rank 1, which calls last; rank 0 has called long before."""
    turns = []
    for time_us in times_us:
        last = {"call_ns": 5_000_000, "return_ns": 5_000_000 + 1000 * time_us, "cpu_ns": 1000}
        turns.append(Turn([{**last, "call_ns": 0}, last], cpu_ns=7000))
    return Score(name, turns, **more)


def rows_of(run, *scores, nbytes=1_000_000):
    return collective_report.rows_of({each.name: each for each in scores}, nbytes, run)


def test_an_all_reduce_takes_as_long_as_the_rank_that_called_last():
    assert score("gradsync", 3, 5).times_us == [3, 5]
    # If rank 0 alone works and has a better clock, that clock counts.
    turn = score("kernels", 3).turns[0]
    turn.ranks[0]["own_ns"] = 2000
    assert turn.time_ns == 2000


def test_bandwidth_is_that_of_nccl_tests():
    (row,) = rows_of(Run(ranks=4), score("gloo", 100, 100, 400, wrong=3))
    assert (row["time_us_p10"], row["time_us_p50"], row["time_us_p99"]) == (100, 100, 400)
    assert row["algbw_gbps"] == pytest.approx(10)
    assert row["busbw_gbps"] == pytest.approx(15)
    assert row["cpu_seconds"] == pytest.approx(7e-6)
    assert row["wrong"] == 3
    assert row["roofline_ratio_p50"] is row["wire_utilisation"] is None
    # A rank of an all-gather sends its buffer once.
    (row,) = rows_of(Run(ranks=4, collective="all_gather"), score("gloo_py", 100))
    assert row["busbw_gbps"] == pytest.approx(7.5)


def test_ratios_are_taken_of_the_same_iteration():
    # The machine is three times as slow in the second iteration.
    rows = rows_of(Run(ranks=2), score("roofline", 10, 30, 10), score("gradsync", 20, 60, 40))
    assert rows[1]["roofline_ratio_p50"] == pytest.approx(0.5)
    assert rows[1]["roofline_ratio_p10"] == pytest.approx(0.25)
    assert rows[0]["roofline_ratio_p50"] == 1


def test_wire_is_busy_for_the_fewest_bytes():
    # 1 MB at 1 Gbit/s: 8 ms over two nodes, 12 ms over four.
    (two,) = rows_of(Run(ranks=4, nodes=2, rate="1gbit"), score("gradsync", 10_000))
    (four,) = rows_of(Run(ranks=4, nodes=4, rate="1gbit"), score("gradsync", 16_000))
    assert two["wire_utilisation"] == pytest.approx(0.8)
    assert four["wire_utilisation"] == pytest.approx(0.75)
    assert "0.800" in collective_report.table_row(two)


def test_kernels_are_compared_with_copies_of_the_same_bytes():
    scores = {"roofline": score("roofline", 100), "kernels": score("kernels", 125)}
    rows = collective_report.rows_of(scores, 1_000_000, Run(ranks=2, gpus=1))
    # Two buffers are read and written.
    assert rows[1]["moved_gbps"] == pytest.approx(4 * 8)
    (line,) = collective_report.comparisons(scores, rows)
    assert line == "1000000: kernels move 32.0 GB/s, 0.80 of what copies do"
    # With several GPUs each has one of four buffers, and staging.
    rows = collective_report.rows_of(scores, 1_000_000, Run(ranks=4, gpus=4))
    assert rows[1]["moved_gbps"] == pytest.approx(4 * 8)


def test_gradsync_is_compared_with_every_other():
    scores = {
        "gradsync": score("gradsync", 1000, 2000, 1000),
        "gloo": score("gloo", 4000, 2000, 3500),
        "openmpi": score("openmpi", 2000, 4000, 2000),
    }
    rows = collective_report.rows_of(scores, 25 << 20, Run(ranks=2))
    (line,) = collective_report.comparisons(scores, rows)
    assert line.startswith("25M: gradsync is 3.50 times as fast as gloo, 2.00 times as fast as ope")
    del scores["gradsync"]
    assert not collective_report.comparisons(scores, rows)


def test_handoff_is_taken_apart():
    times = {"marked_ns": 11_000, "ready_ns": 30_000, "start_ns": 37_000, "finish_ns": 57_000}
    last = {"call_ns": 0, "return_ns": 65_000, "enqueued_ns": 20_000, "host_synchronizations": 1}
    scores = {"gradsync": Score("gradsync", [Turn([{**last, **times}], 0)])}
    row = handoff_report.figures(scores)
    assert list(row.values()) == [11, 11, 65, 65, 30, 7, 20, 8]
    assert handoff_report.table_row(0, row, on_gpus=False).split()[:2] == ["0", "11.0"]
    nccl = {"call_ns": 0, "return_ns": 40_000, "enqueued_ns": 5_000}
    row = handoff_report.figures({**scores, "nccl": Score("nccl", [Turn([nccl], 0)])})
    assert (row["enqueued_us_p50"], row["in_process_us_p50"], row["added_us_p50"]) == (20, 5, 15)
    assert (row["in_process_done_us_p50"], row["host_synchronizations"]) == (40, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "COMMAND"),
        ("all-reduce", "invalid choice"),
        ("allreduce --verbose", "--verbose"),
        ("allreduce --ranks 9", "takes a number from 1 to 8, not '9'"),
        ("allreduce --ranks 1", "1 ranks in all, must be 2 to 8"),
        ("allreduce --nodes 3 --ranks 3", "9 ranks in all, must be 2 to 8"),
        ("allreduce --rate 1gbit", "it needs --nodes 2 or more"),
        ("allreduce --nodes 2 --rate fast", "takes a rate such as 1gbit or 100mbit, not 'fast'"),
        ("allreduce --dtype int8", "invalid choice: 'int8'"),
        ("allreduce -b 64KB", "'64KB' is no size"),
        ("allreduce -e 3G", "more than 2G"),
        ("allreduce -b 1M -e 64K", "-b 1M is larger"),
        ("allreduce -b 6", "no whole number of float32"),
        ("allreduce -f 1", "takes a number from 2"),
        ("allreduce -n 5x", "not '5x'"),
        ("allreduce -n", "expected one argument"),
        ("allreduce --busy=no", "ignored explicit argument"),
        ("allreduce --json=", "cannot be written"),
        ("allreduce --impl mpich", "is no list of roofline,"),
        ("allreduce --impl gloo,gloo", "is no list of"),
        ("allreduce --impl kernels", "--impl kernels is not of host memory"),
        ("allreduce --nodes 2 --impl openmpi", "--impl openmpi is of one node alone"),
        ("allreduce --impl gloo_py --dtype float16", "--dtype float32 alone"),
        ("allgather --impl gloo", "is no list of gradsync_group,gloo_py"),
        ("allgather --dtype float16", "unrecognized arguments: --dtype"),
        ("reducescatter -b 4K --ranks 3", "4096 bytes cannot be divided among 3 ranks"),
        ("allgather --device cuda", "--impl gradsync_group is not of GPUs"),
        ("allreduce --device cuda --impl gloo", "--impl gloo is not of GPUs"),
        ("allreduce --device cuda --impl nccl", "--gpus as --ranks"),
        ("allreduce --device cuda --nodes 2", "is of one node"),
        ("handoff -b 64K", "unrecognized arguments: -b"),
    ],
)
def test_wrong_usage_is_named(capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        gradsync_bench.main(arguments.split())
    assert end.value.code == 2
    assert says in capsys.readouterr().err


# ---- step.py ----


def measured(*rounds_ms):
    result = step_report.Measured()
    for step_ms in rounds_ms:
        # Rank 1 is the slower one.
        steps_ms = [[1, 1, 1], [2 * step_ms, step_ms, 0.5]]
        outside_ms = [[step / 4 for step in steps] for steps in steps_ms]
        result.add_round(steps_ms, outside_ms, cpu_seconds=0.6)
    return result


def model_result(**changes):
    fields = {
        "model": "communication_heavy",
        "size": step_report.ModelSize("layers", 25_000_000, 16),
        "ranks": 2,
        "measured": {
            "bare": measured(40, 40, 80),
            "ddp_noop": measured(50, 50, 100),
            "gradsync": measured(60, 55, 120),
            "gradsync_hook": measured(80, 90, 160),
            "ddp_gloo": measured(100, 100, 200),
        },
        "difference": 0.0,
        **changes,
    }
    return step_report.ModelResult(**fields)


def test_a_round_is_its_slowest_ranks_median():
    result = measured(40, 60, 50)
    assert result.rounds_ms == [40, 60, 50]
    assert result.step_ms_p50 == 50
    # 0.6 s of 3 steps.
    assert result.cpu_seconds == pytest.approx(20)


def test_a_step_is_compared_with_the_larger_of_computation_and_wire():
    # 100 MB in 80 ms: rounds of 40, 40 and 80 ms without communication.
    result = model_result(ranks=4, nodes=2, rate="10gbit")
    assert result.wire_ms == 80
    assert result.of_limit("gradsync") == 60 / 80
    assert result.of_limit("gradsync_hook") == 90 / 80
    assert not result.counts
    lines = step_report.verdicts(result)
    assert "gradsync_hook: 1.125 of the larger of computation (40 ms) and wire (80 ms)" in lines[2]
    assert "met" in lines[2] and "NOT" not in lines[2]
    # A quarter of bare's step, and 1514 bytes of the wire for 1448 of the gradients.
    assert result.floor == pytest.approx((10 + 80 * 1514 / 1448) / 80)
    assert lines[2].endswith(f"no step can be below {result.floor:.3f}")
    # Each of 4 nodes sends half as much again.
    assert model_result(nodes=4, rate="10gbit").wire_ms == 120
    assert model_result(nodes=4).of_limit("gradsync") is None


def test_shares_are_of_the_same_round():
    result = model_result()
    assert result.share_of_gloo("gradsync", "ddp_noop") == pytest.approx([0.2, 0.1, 0.2])
    assert result.share_of_gloo("gradsync", "bare") == pytest.approx([1 / 3, 1 / 4, 1 / 3])
    assert result.beyond_ms("gradsync", "ddp_noop") == 10
    assert result.of_gloo("gradsync") == pytest.approx(0.6)
    # If Gloo costs nothing, there is nothing to compare with.
    slow = {**result.measured, "ddp_noop": measured(50, 100, 100)}
    nothing = model_result(measured=slow)
    assert nothing.share_of_gloo("gradsync", "ddp_noop") is None
    assert "gradsync: beyond ddp_noop no share: " in step_report.verdicts(nothing)[0]


def test_targets_apply_to_the_large_model_alone():
    wrapper, hook = step_report.verdicts(model_result())
    assert "gradsync: beyond ddp_noop 0.20" in wrapper
    assert wrapper.count("target at most 0.20: met") == 1
    assert "target at most 0.50: NOT met" in hook
    small = step_report.ModelSize("layers", 24_000_000, 16)
    for other in ({"model": "compute_heavy"}, {"size": small}, {"ranks": 4}):
        assert "target" not in "".join(step_report.verdicts(model_result(**other)))


def test_rows_of_steps_have_the_keys_that_are_promised():
    rows = step_report.to_json(model_result())
    assert rows[2]["impl"] == "gradsync"
    assert rows[2].keys() >= {"model", "impl", "step_ms_p50", "cpu_seconds"}
