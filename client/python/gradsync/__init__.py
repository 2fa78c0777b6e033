"""gradsync: averages the gradients of data-parallel training through the daemon of this node.

    import gradsync

    with gradsync.Session.join() as session:  # on every rank
        layout = session.register_layout(parameters=[gradsync.Parameter("weight", (10, 3))])
        gradient = layout.gradient(0).numpy()  # in memory that the daemon shares
        step = layout.next_step
        gradient[:] = ...  # the backward pass
        layout.mark_ready(step, 0)  # each bucket, as soon as it is written
        layout.end_step(step)
        layout.wait_step(step)  # now the gradient is the average over the ranks

Does not need PyTorch. Only View.numpy() needs NumPy.
"""

from gradsync.data_type import DataType
from gradsync.device import cuda_device_uuid
from gradsync.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from gradsync.layout import Layout
from gradsync.layout_spec import Bucket, Parameter
from gradsync.options import SessionOptions
from gradsync.reason import Reason
from gradsync.session import LOWEST_LIVE_RANK, Session, Statistics
from gradsync.state import CurrentLayout, StateImage, StateMemory
from gradsync.step_result import BucketTimes, GradientStats, StepResult, clip_coefficient
from gradsync.view import View

__version__ = "0.1.0"

__all__ = [
    "LOWEST_LIVE_RANK",
    "AbortedError",
    "AlreadyExistsError",
    "Bucket",
    "GradientStats",
    "BucketTimes",
    "CurrentLayout",
    "DataType",
    "DeadlineExceededError",
    "Error",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "Layout",
    "Parameter",
    "PermissionDeniedError",
    "Reason",
    "ResourceExhaustedError",
    "Session",
    "SessionOptions",
    "StateImage",
    "StateMemory",
    "Statistics",
    "StepResult",
    "UnavailableError",
    "UnimplementedError",
    "View",
    "clip_coefficient",
    "cuda_device_uuid",
]
