"""What the benchmarks make of times that are known."""

import argparse
import pathlib
import sys
import xml.etree.ElementTree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"))

import allreduce_figures
import bar_chart
import command_line
import step_report
from quantile import median, quantile


def test_quantiles_are_samples_and_the_median_is_in_the_middle():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert quantile(range(1, 101), 0.9) == 90
    assert quantile([5], 0.1) == 5


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
    # Gloo that costs nothing is no measure.
    slow = {**result.measured, "ddp_noop": measured(50, 100, 100)}
    assert model_result(measured=slow).share_of_gloo("gradsync", "ddp_noop") is None


def test_reaches_are_said_of_the_large_model_alone():
    wrapper, hook = step_report.verdicts(model_result())
    assert "gradsync: beyond ddp_noop 0.20" in wrapper
    assert wrapper.count("reach at most 0.20: met") == 1
    assert "reach at most 0.50: NOT met" in hook
    small = step_report.ModelSize("layers", 24_000_000, 16)
    for other in ({"model": "compute_heavy"}, {"size": small}, {"ranks": 4}):
        assert "reach" not in "".join(step_report.verdicts(model_result(**other)))


def test_rows_of_steps_have_the_keys_that_are_promised():
    rows = step_report.to_json(model_result())
    assert rows[2]["impl"] == "gradsync"
    assert rows[2].keys() >= {"model", "impl", "step_ms_p50", "cpu_seconds"}


def test_all_reduces_are_compared_in_pairs():
    scores = {
        "gradsync": allreduce_figures.Score([1000, 2000, 1000], [0.1] * 3),
        "deepspeed": allreduce_figures.Score([4000, 2000, 3500], [0.1] * 3, wrong=7),
    }
    result = allreduce_figures.SizeResult(25 << 20, 2, scores)
    (line,) = allreduce_figures.verdicts([result])
    assert line == "25M: gradsync is 3.50 times as fast as deepspeed (reach 3: met)"
    ours, theirs = allreduce_figures.to_json(result)
    assert ours["algbw_gbps"] == pytest.approx(26.2144)
    assert ours["gradsync_ratio_p50"] is None
    assert (theirs["wrong"], theirs["gradsync_ratio_p10"]) == (7, 1)


def test_sizes_are_those_of_gradsync_bench():
    for text, number in (("4", 4), ("64K", 65536), ("25M", 25 << 20), ("1G", 1 << 30)):
        assert command_line.parse_byte_size(text) == number
        assert command_line.format_byte_size(number) == text
    for wrong in ("", "0", "K", "-1", "1.5M", "64k"):
        with pytest.raises(argparse.ArgumentTypeError):
            command_line.parse_byte_size(wrong)


def test_a_picture_is_xml_whatever_it_says():
    bar = bar_chart.Bar("<a> & 'b'", 0.0, '"', "]]>", bar_chart.OURS, 0.0, 0.0)
    text = bar_chart.bar_chart('<&">', "&", [bar_chart.Group("&", "<", [bar])], ["<"])
    xml.etree.ElementTree.fromstring(text)
