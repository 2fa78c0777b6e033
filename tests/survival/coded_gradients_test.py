"""The averages of coded gradients tell whose contributions they hold."""

import pytest
import torch
from coded_gradients import CodedGradients

COUNT = 100


def contribution(ranks, rank, step, accumulate=2):
    coded = CodedGradients(COUNT, ranks, rank, accumulate)
    parameter = torch.zeros(COUNT, requires_grad=True)
    for turn in range(accumulate):
        coded.loss(parameter, step, turn).backward()
    return parameter.grad


def average(contributions, ranks):
    return sum(contributions) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_rank_once_is_right(ranks, accumulate):
    for step in range(9):
        parts = [contribution(ranks, rank, step, accumulate) for rank in range(ranks)]
        coded = CodedGradients(COUNT, ranks, 0, accumulate)
        assert coded.wrong(average(parts, ranks), step) is None


def test_a_missing_and_a_doubled_contribution_are_named():
    parts = [contribution(4, rank, 5) for rank in range(4)]
    coded = CodedGradients(COUNT, 4, 0, 2)
    missing = coded.wrong(average(parts[:3], 4), 5)
    assert "rank 2 1 times, rank 3 0 times" in missing
    doubled = coded.wrong(average([*parts, parts[1]], 4), 5)
    assert "rank 0 1 times, rank 1 2 times" in doubled


def test_one_wrong_element_is_found():
    right = average([contribution(4, rank, 5) for rank in range(4)], 4)
    right[37] += 0.25
    assert "1 of 100 averages are wrong; element 37 is" in CodedGradients(COUNT, 4, 0, 2).wrong(
        right, 5
    )


def test_a_contribution_of_another_step_is_found():
    parts = [contribution(4, rank, 5) for rank in range(3)] + [contribution(4, 3, 4)]
    assert CodedGradients(COUNT, 4, 0, 2).wrong(average(parts, 4), 5) is not None
