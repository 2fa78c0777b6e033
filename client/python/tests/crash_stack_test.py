"""A test that crashes prints the stack of the thread that did it."""

import os
import signal
import subprocess
import sys
import textwrap

_CRASH = textwrap.dedent("""
    import ctypes, faulthandler, sys
    faulthandler.enable()
    ctypes.CDLL(sys.argv[1]).PrintCrashes(1)
    libc = ctypes.CDLL(None)
    # A thread without a Python frame: it runs abort().
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
    libc.pthread_join(thread, None)
""")


def test_both_stacks_are_printed():
    library = os.path.abspath("client/python/tests/libcrash_stack.so")
    ended = subprocess.run(
        [sys.executable, "-c", _CRASH, library], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == -signal.SIGABRT, ended
    assert "crashes:" in ended.stdout, ended
    assert "(abort+" in ended.stdout, ended
    assert "Fatal Python error: Aborted" in ended.stderr, ended
