"""What a rank says while it waits for another one that does not come."""

import contextlib
import logging
import os
import select
import signal
import threading
import uuid

import gradsync
import pytest
from gradsync import _notices
from threads import options


class _Answer(logging.Handler):
    """Keeps the records, and runs `then` on another thread after the first one."""

    def __init__(self, then):
        super().__init__()
        self.records = []
        self.thread = threading.Thread(target=then)

    def emit(self, record):
        self.records.append(record)
        if len(self.records) == 1:
            self.thread.start()


@contextlib.contextmanager
def first_notice(then):
    """A context whose body waits until `then` ends its wait; gives the list of the notices."""
    handler = _Answer(then)
    logger = logging.getLogger("gradsync")
    logger.addHandler(handler)
    try:
        yield handler.records
        handler.thread.join()
    finally:
        logger.removeHandler(handler)


def test_a_rank_that_never_comes_is_named(daemon):
    job_id = uuid.uuid4().hex
    spec = {"explicit_buckets": [gradsync.Bucket(4)], "timeout": 300}
    first = gradsync.Session.join(options(daemon, 0, 2, job_id))
    others = []

    def come():
        others.append(gradsync.Session.join(options(daemon, 1, 2, job_id)))
        others.append(others[0].register_layout("ddp0", **spec))

    with first_notice(come) as records:
        layout = first.register_layout("ddp0", **spec)
    assert records[0].levelno == logging.WARNING
    text = records[0].getMessage()
    assert text.startswith("gradsync: rank 0 still waits for layout 'ddp0' after ")
    assert text.endswith("s: rank 1 has not joined the job")

    def operate():
        others[0].barrier(300)

    with first_notice(operate) as records:
        first.barrier(300)
    text = records[0].getMessage()
    assert text.startswith("gradsync: rank 0 still waits for operation 1 (barrier) after ")
    assert text.endswith("s: rank 1 has not called it")

    layout.finish_step(1)
    with first_notice(lambda: others[0].close()) as records:
        with pytest.raises(gradsync.AbortedError, match="rank 1"):
            layout.wait_step(1, 300)
    text = records[0].getMessage()
    assert text.startswith("gradsync: rank 0 still waits for step 1 of layout 'ddp0' after ")
    assert text.endswith("s: rank 1 has not begun it")
    first.close()


class _Raises(logging.Filter):
    """Raises for the first record that it sees."""

    def filter(self, record):
        logging.getLogger("gradsync").removeFilter(self)
        raise ValueError("a filter of the user's")


def test_a_filter_that_raises_ends_no_later_notice(daemon, monkeypatch):
    """The daemon's notices come every 30 s, so this test gives its own."""
    texts = ["the first", "the second"]

    def take(reference):
        return 0, texts.pop(0) if texts else ""

    monkeypatch.setattr(_notices, "_take", take)
    logging.getLogger("gradsync").addFilter(_Raises())
    said = threading.Event()
    with first_notice(said.set) as records, gradsync.Session.join(options(daemon)):
        assert said.wait(60)
    assert records[0].getMessage() == "gradsync: rank 0 still waits for the second"


def test_a_child_that_is_forked_amid_a_look_can_exit(daemon):
    """The thread of the notices holds its locks while the process forks."""
    with gradsync.Session.join(options(daemon)):
        with _notices._exit._cond, _notices._lock, _notices._saying:
            child = os.fork()
            if child == 0:
                _notices._stop()  # as at the interpreter's exit
                os._exit(7)
        ended = os.pidfd_open(child)
        exits, _, _ = select.select([ended], [], [], 60)
        os.close(ended)
        if not exits:
            os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
