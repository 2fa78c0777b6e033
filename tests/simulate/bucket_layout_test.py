"""The daemon's rule: the layouts of tests/job/layout_plan_test.cc."""

import pytest
from simulate.bert import bert
from simulate.bucket_layout import (
    BUCKET_ALIGNMENT,
    ITEM_SIZES,
    MIB,
    PARAMETER_ALIGNMENT,
    Parameter,
    plan,
)
from simulate.resnet50 import resnet50


def buckets_of(parameters, first_cap=MIB, cap=25 * MIB):
    """The bucket of each parameter, in the order of registration."""
    where = {}
    for number, bucket in enumerate(plan(parameters, cap, first_cap).buckets):
        for index in bucket.parameters:
            where[index] = number
    return [where[index] for index in range(len(parameters))]


def of(*elements):
    """float32 parameters."""
    return [Parameter("p", count) for count in elements]


@pytest.mark.parametrize(
    ("parameters", "first_cap", "cap", "buckets"),
    [
        (of(10, 10, 10, 10, 10), 80, 80, [2, 1, 1, 0, 0]),
        (of(10, 10, 10, 10, 10), 40, 1000, [1, 1, 1, 1, 0]),
        (of(10, 10), 80, 80, [0, 0]),
        (of(10, 10), 79, 80, [1, 0]),
        (of(1, 100, 1), 40, 40, [2, 1, 0]),
        (of(1, 1, 100), 40, 40, [1, 1, 0]),
        (of(10, 10, 10), 1, 1, [2, 1, 0]),
        (of(10, 10, 10), 0, 0, [2, 1, 0]),
    ],
)
def test_parameters_fill_buckets_in_reverse_order(parameters, first_cap, cap, buckets):
    assert buckets_of(parameters, first_cap, cap) == buckets


def test_a_bucket_has_one_type_and_is_numbered_by_its_first_parameter():
    parameters = [Parameter("p", 2, dtype) for dtype in ("float32", "bfloat16") * 2]
    assert buckets_of(parameters) == [1, 0, 1, 0]


def test_each_type_has_a_small_first_bucket():
    parameters = []
    for _ in range(4):
        parameters += [Parameter("f", 2), Parameter("h", 4, "float16")]
    assert buckets_of(parameters, 8, 1000) == [3, 2, 3, 2, 3, 2, 1, 0]


def test_buckets_are_numbered_in_the_order_in_which_they_are_full():
    parameters = [
        Parameter("d0", 1, "float64"),
        Parameter("f0", 1),
        Parameter("f1", 10),
        Parameter("d1", 1, "float64"),
    ]
    assert buckets_of(parameters, 40, 40) == [1, 2, 0, 1]


def test_padding_counts_for_the_bucket_but_not_for_the_cap():
    (bucket,) = plan(of(3, 3), 24, 24).buckets
    assert bucket.count == PARAMETER_ALIGNMENT // 4 + 3


def test_scalars_and_empty_parameters_have_a_place():
    layout = plan(of(0, 1))
    assert len(layout.buckets) == 1
    assert layout.arena_bytes == 4096


def test_everything_is_aligned_and_nothing_overlaps():
    types = list(ITEM_SIZES)
    parameters = [
        Parameter(f"p{i}", (1 + i * 7 % 23) * (1 + i % 3), types[i % 4]) for i in range(40)
    ]
    layout = plan(parameters, 300, 64)
    end = 0
    for bucket in layout.buckets:
        assert bucket.offset % BUCKET_ALIGNMENT == 0
        assert bucket.offset >= end
        assert all(parameters[index].dtype == bucket.dtype for index in bucket.parameters)
        end = bucket.offset + bucket.nbytes
    assert end <= layout.arena_bytes
    assert layout.arena_bytes % 4096 == 0
    members = [index for bucket in layout.buckets for index in bucket.parameters]
    assert sorted(members) == list(range(40))


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
    carried = sum(bucket.nbytes for bucket in plan(model.parameters).buckets)
    assert model.nbytes <= carried <= model.nbytes + tensors * PARAMETER_ALIGNMENT


def test_resnet50_multiplies_as_often_as_published():
    # 4.09 billion multiplications and additions for an image (torchvision's documentation).
    operations = sum(tensor.operations for tensor in resnet50().tensors)
    assert operations / 2 == pytest.approx(4.09e9, rel=0.02)
