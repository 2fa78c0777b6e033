"""What tools/soak calls a fault."""

import dataclasses
import os

from neighbours import Steps
from process_footprint import Footprint, footprint_of, grown
from soak import Round, faults_of

IDLE = Steps(p50_us=2000, p99_us=3000, max_us=9000, wrong=0)
FOOTPRINT = Footprint(memory_kib=100_000, files=30, threads=20, mappings=500, shared_files=3)


def under(steps):
    return faults_of(Round("flood", {"small": IDLE}, {"small": steps}, FOOTPRINT))


def test_a_job_within_its_bounds_has_no_fault():
    assert under(Steps(p50_us=6000, p99_us=15_000, max_us=10**6, wrong=0)) == []


def test_a_slow_median_a_slow_p99_and_a_wrong_sum_are_faults():
    assert under(Steps(6001, 15_000, 15_000, 0)) == [
        "flood: job small: p50_us 6001, 2000 without it; at most 3 times as long"
    ]
    assert under(Steps(6000, 15_001, 15_001, 0)) == [
        "flood: job small: p99_us 15001, 3000 without it; at most 5 times as long"
    ]
    assert under(Steps(2000, 3000, 3000, 1)) == ["flood: job small has 1 wrong sums"]


def test_everything_that_grows_is_a_fault():
    assert grown(FOOTPRINT, FOOTPRINT) == []
    for field in dataclasses.fields(Footprint):
        larger = dataclasses.replace(FOOTPRINT, **{field.name: 10**6})
        (fault,) = grown(FOOTPRINT, larger)
        assert fault.startswith(f"{field.name} has grown from")


def test_an_open_file_counts():
    before = footprint_of(os.getpid())
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        assert footprint_of(os.getpid()).files == before.files + 1
    finally:
        os.close(fd)
    assert before.memory_kib > 1000 and before.threads >= 1 and before.mappings > 10
