"""The exceptions: their classes, their fields, pickling."""

import copy
import pickle

import gradsync
import pytest
from gradsync import _library, errors

CLASSES = {
    "INVALID_ARGUMENT": (gradsync.InvalidArgumentError, ValueError),
    "DEADLINE_EXCEEDED": (gradsync.DeadlineExceededError, TimeoutError),
    "ABORTED": (gradsync.AbortedError, RuntimeError),
    "FAILED_PRECONDITION": (gradsync.FailedPreconditionError, RuntimeError),
    "UNAVAILABLE": (gradsync.UnavailableError, ConnectionError),
    "ALREADY_EXISTS": (gradsync.AlreadyExistsError, RuntimeError),
    "PERMISSION_DENIED": (gradsync.PermissionDeniedError, PermissionError),
    "RESOURCE_EXHAUSTED": (gradsync.ResourceExhaustedError, RuntimeError),
    "UNIMPLEMENTED": (gradsync.UnimplementedError, NotImplementedError),
    "INTERNAL": (gradsync.InternalError, RuntimeError),
}


@pytest.mark.parametrize("number", range(1, 17))
def test_every_code_of_the_library_has_a_class(number):
    code = _library.library.code_name(number).decode()
    kind, also = CLASSES.get(code, CLASSES["INTERNAL"])
    error = errors.class_of(code)("what", code=code)
    assert type(error) is kind and isinstance(error, (gradsync.Error, RuntimeError))
    assert isinstance(error, also) and error.code == code
    assert str(error) == f"{code}: what" and error.message == "what"


@pytest.mark.parametrize("kind", [kind for kind, _ in CLASSES.values()])
def test_fields_are_kept_and_pickled(kind):
    fields = {"reason": "WHY", "job": "j", "rank": 1, "channel": 2, "step": 3, "bucket": 4}
    error = kind("what", **fields)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind and str(same) == f"{kind.code}/WHY: what"
        assert {name: getattr(same, name) for name in fields} == fields
        assert CLASSES[same.code][0] is kind
    bare = kind("what")
    assert (bare.rank, bare.step, bare.bucket, bare.job, bare.reason) == (None, None, None, "", "")
