"""What the quick start makes of its measurements."""

import array
import math
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "quick_start"))
import figures  # noqa: E402


def _good():
    return figures.Figures(
        nodes=1, ranks=2, test_accuracy=97.5, max_difference_sharded=0, max_difference_whole=1e-6
    )


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("test_accuracy", 95.99, "the test accuracy is 95.99 %, below 96 %"),
        ("max_difference_sharded", 5e-324, "bit by bit"),
        ("max_difference_whole", 1.1e-5, "more than 1e-05"),
        ("unequal_ranks", [1, 3], "the parameters of rank 1, 3 are not those of rank 0"),
    ],
)
def test_each_wrong_figure_is_a_failure(name, value, words):
    wrong = _good()
    assert wrong.failures() == []
    setattr(wrong, name, value)
    (failure,) = wrong.failures()
    assert words in failure


def test_a_figure_that_is_not_a_number_is_a_failure():
    unmeasured = figures.Figures(nodes=1, ranks=2)
    assert math.isnan(unmeasured.test_accuracy)
    assert len(unmeasured.failures()) == 3


def test_json_has_the_agreed_keys():
    assert set(_good().json()) >= {
        *("nodes", "ranks", "test_accuracy", "max_difference_sharded", "max_difference_whole"),
        *("steps", "bytes_reduced", "reduce_gbps", "overlap_percent", "step_ms"),
        *("step_ms_without_overlap", "failures"),
    }


@pytest.mark.parametrize(
    "first, second, difference",
    [
        ([1, 2, 3], [1, 2, 3], 0),
        ([1, 2, 3], [1, 4, 2], 2),
        ([1, 2], [1], math.inf),
        ([], [], math.inf),
        ([1, math.nan, 3], [1, 2, 3], math.inf),
        ([1, math.nan, 3], [1, math.nan, 3], math.inf),
    ],
)
def test_largest_difference_shows_nan_and_unequal_sizes(tmp_path, first, second, difference):
    paths = []
    for name, values in (("first", first), ("second", second)):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(array.array("f", values).tobytes())
    assert figures.largest_difference(*paths) == difference


def _step(number, commit):
    """Two buckets, ready on the last rank at 110 and 210, reduced 50 and 100 later."""
    return {
        "step": str(number),
        "commit_ns": str(commit),
        "buckets": [
            {"ready_ns": ["100", "110"], "finish_ns": "160"},
            {"ready_ns": ["210", "200"], "finish_ns": "310"},
        ],
    }


def test_overlap_is_the_hidden_part_of_the_synchronization():
    # 50 + 100 in all, exposed 315 - 210.
    assert figures.overlap(_step(1, 315)) == pytest.approx(1 - 105 / 150)
    assert figures.overlap(_step(1, 1000)) == 0


def test_the_typical_step_is_nearest_to_the_medians():
    steps = [_step(1, 900), _step(2, 320), _step(3, 330), _step(4, 340), _step(5, 311)]
    assert figures.typical_step(steps)["step"] == "3"


@pytest.mark.parametrize(
    "on, off, ranks, link_ms, sentence",
    [
        (20, 25, 4, 12.7, "Overlap makes a step 1.25 times as fast: 20.00 ms instead of 25.00 ms"
         " (the link alone: 12.7 ms)."),
        (6, 6.1, 1, 0, "Overlap gains nothing here: 6.00 ms with it, 6.10 ms without it."),
        (6, 5, 2, 0, "Overlap gains nothing here: 6.00 ms with it, 5.00 ms without it.\n2 trainers"
         " keep the 2 CPUs busy, which averaging needs too. To see a gain: --nodes 2 --rate"
         " 1gbit."),
    ],
)  # fmt: skip
def test_the_gain_is_said_in_a_sentence(on, off, ranks, link_ms, sentence):
    measured = figures.Figures(nodes=1, ranks=ranks, step_ms=on, step_ms_without_overlap=off)
    assert figures.what_overlap_gains(measured, link_ms, cpus=2) == sentence
