"""The daemon's rule: the layouts of tests/job/layout_plan_test.cc."""

import pytest
from simulate.bert import bert
from simulate.bucket_layout import MIB, PARAMETER_ALIGNMENT, plan
from simulate.resnet50 import resnet50


def buckets_of(elements, first_cap=MIB, cap=25 * MIB):
    """The bucket of each float32 parameter, in the order of registration."""
    where = {}
    for number, bucket in enumerate(plan([4 * count for count in elements], cap, first_cap)):
        for index in bucket.parameters:
            where[index] = number
    return [where[index] for index in range(len(elements))]


@pytest.mark.parametrize(
    ("elements", "first_cap", "cap", "buckets"),
    [
        ((10, 10, 10, 10, 10), 80, 80, [2, 1, 1, 0, 0]),
        ((10, 10, 10, 10, 10), 40, 1000, [1, 1, 1, 1, 0]),
        ((10, 10), 80, 80, [0, 0]),
        ((10, 10), 79, 80, [1, 0]),
        ((1, 100, 1), 40, 40, [2, 1, 0]),
        ((1, 1, 100), 40, 40, [1, 1, 0]),
        ((10, 10, 10), 1, 1, [2, 1, 0]),
        ((10, 10, 10), 0, 0, [2, 1, 0]),
        ((0, 1), MIB, MIB, [0, 0]),
    ],
)
def test_parameters_fill_buckets_in_reverse_order(elements, first_cap, cap, buckets):
    assert buckets_of(elements, first_cap, cap) == buckets


def test_padding_counts_for_the_bucket_but_not_for_the_cap():
    (bucket,) = plan([12, 12], 24, 24)
    assert bucket.nbytes == PARAMETER_ALIGNMENT + 12


@pytest.mark.parametrize(
    ("model", "elements", "tensors"),
    [
        (resnet50(), 25_557_032, 161),
        (bert("base"), 109_482_240, 199),
        (bert("large"), 335_141_888, 391),
    ],
)
def test_models_are_the_published_ones(model, elements, tensors):
    assert model.elements == elements
    assert len(model.tensors) == tensors
    shares = model.backward_shares()
    assert sum(shares) == pytest.approx(1)
    # Padding between tensors is all that a layout adds.
    carried = sum(bucket.nbytes for bucket in plan(model.sizes))
    nbytes = 4 * elements
    assert nbytes <= carried <= nbytes + tensors * PARAMETER_ALIGNMENT


def test_resnet50_multiplies_as_often_as_published():
    # 4.09 billion multiplications and additions for an image (torchvision's documentation).
    operations = sum(tensor.operations for tensor in resnet50().tensors)
    assert operations / 2 == pytest.approx(4.09e9, rel=0.02)
