"""An exception that passes is noticed, and one that was there before is not."""

import sys

import pytest
from gradsync._unwinding import Unwinding


def during(error, unwinding=None):
    """What is noticed in a `finally` block that `error` passes."""
    unwinding = unwinding or Unwinding()
    found = []
    try:
        try:
            raise error
        finally:
            found.append(unwinding.error())
    except BaseException:
        found.append(unwinding.error())
    found.append(unwinding.error())
    return found


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_counts_until_it_is_handled(kind):
    error = kind(1)
    assert during(error) == [error, error, None]


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None), GeneratorExit()], ids=repr)
def test_a_good_end_is_no_exception(error):
    assert during(error) == [None, None, None]


def test_an_exception_that_was_handled_before_does_not_count():
    try:
        raise ImportError
    except ImportError:
        unwinding = Unwinding()
        assert unwinding.error() is None
        error = ValueError()
        assert during(error, unwinding) == [error, error, None]
        assert sys.exc_info()[1] is not None and unwinding.error() is None
