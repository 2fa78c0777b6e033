"""Guarded pages stop their next reader, in any code."""

import ctypes
import hashlib
import mmap
import subprocess
import sys
import threading

import numpy as np
from guarded_pages import GuardedPages

SIZE = 1 << 20
memory = np.arange(SIZE, dtype="u1")
pages = GuardedPages(memory.ctypes.data, SIZE)


def test_a_reader_waits_and_then_reads_what_was_there():
    reads, may_read, digests = threading.Event(), threading.Event(), []
    wanted = hashlib.sha256(memory).digest()

    def on_read():
        reads.set()
        return not may_read.wait(60)

    pages.arm(on_read)
    reader = threading.Thread(target=lambda: digests.append(hashlib.sha256(memory).digest()))
    reader.start()
    assert reads.wait(60)
    assert not digests
    may_read.set()
    reader.join(60)
    assert digests == [wanted]


def test_code_without_python_is_stopped_too():
    calls = []
    copy = ctypes.create_string_buffer(SIZE)
    pages.arm(lambda: calls.append(threading.get_ident()) is not None)
    for _ in range(2):
        ctypes.memmove(copy, memory.ctypes.data, SIZE)
    assert calls == [threading.get_ident()]
    assert copy.raw == memory.tobytes()


def test_a_reader_can_be_stopped_again_and_again():
    calls = []
    copy = ctypes.create_string_buffer(SIZE)

    def on_read():
        calls.append(1)
        return len(calls) < 3

    pages.arm(on_read)
    for reads, wanted in ((1, 2), (2, 3), (3, 3)):
        # Page by page: memmove() of everything may begin at the end.
        for offset in range(0, SIZE, mmap.PAGESIZE):
            ctypes.memmove(ctypes.byref(copy, offset), memory.ctypes.data + offset, mmap.PAGESIZE)
        assert len(calls) == wanted, reads
    assert copy.raw == memory.tobytes()


def test_a_disarmed_page_stops_nobody():
    calls = []
    pages.arm(lambda: calls.append(1) is not None)
    pages.disarm()
    assert int(memory.sum()) == int(memory.astype("u8").sum())
    assert not calls


def test_another_fault_of_the_program_still_ends_it():
    text = (
        "import ctypes, sys; sys.path[:0] = {path!r}\n"
        "import guarded_pages_test\n"
        "ctypes.string_at(8)\n"
    ).format(path=sys.path)
    ended = subprocess.run([sys.executable, "-c", text], cwd=__file__.rpartition("/")[0])
    assert ended.returncode == -11
