"""A guarded page stops its next reader, in any code, once."""

import ctypes
import hashlib
import subprocess
import sys
import threading

import numpy as np
from guarded_page import GuardedPage

SIZE = 1 << 20
memory = np.arange(SIZE, dtype="u1")
page = GuardedPage(memory.ctypes.data, SIZE)


def test_a_reader_waits_and_then_reads_what_was_there():
    reads, may_read, digests = threading.Event(), threading.Event(), []
    wanted = hashlib.sha256(memory).digest()

    def on_read():
        reads.set()
        assert may_read.wait(60)

    page.arm(on_read)
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
    page.arm(lambda: calls.append(threading.get_ident()))
    for _ in range(2):
        ctypes.memmove(copy, memory.ctypes.data, SIZE)
    assert calls == [threading.get_ident()]
    assert copy.raw == memory.tobytes()


def test_a_disarmed_page_stops_nobody():
    calls = []
    page.arm(lambda: calls.append(1))
    page.disarm()
    assert int(memory.sum()) == int(memory.astype("u8").sum())
    assert not calls


def test_another_fault_of_the_program_still_ends_it():
    text = (
        "import ctypes, sys; sys.path[:0] = {path!r}\n"
        "import guarded_page_test\n"
        "ctypes.string_at(8)\n"
    ).format(path=sys.path)
    ended = subprocess.run([sys.executable, "-c", text], cwd=__file__.rpartition("/")[0])
    assert ended.returncode == -11
