"""The reasons for which calls fail."""

from __future__ import annotations

from typing import Final


class Reason:
    """The values of `Error.reason`, as constants. docs/errors.md says what each means.

    They are strings: a newer daemon can give a reason that is not here.

        except gradsync.Error as error:
            if error.reason == gradsync.Reason.STEP_ABANDONED:
    """

    # ---- Joining

    CREDENTIALS: Final = "CREDENTIALS"
    JOB_MISMATCH: Final = "JOB_MISMATCH"
    LOSS_POLICY: Final = "LOSS_POLICY"
    RANK_OCCUPIED: Final = "RANK_OCCUPIED"
    VERSION: Final = "VERSION"

    # ---- What a call may ask for

    MALFORMED: Final = "MALFORMED"
    MEMORY: Final = "MEMORY"
    OPEN_FILES: Final = "OPEN_FILES"
    PROTOCOL_VIOLATION: Final = "PROTOCOL_VIOLATION"
    QUOTA: Final = "QUOTA"

    # ---- The end of a session or a job

    CLOSED: Final = "CLOSED"
    DAEMON_LOST: Final = "DAEMON_LOST"
    DAEMON_SILENT: Final = "DAEMON_SILENT"
    DRAINING: Final = "DRAINING"
    FORKED: Final = "FORKED"
    LEASE_EXPIRED: Final = "LEASE_EXPIRED"
    LEFT: Final = "LEFT"
    PROCESS_ENDED: Final = "PROCESS_ENDED"
    RANK_FINISHED: Final = "RANK_FINISHED"
    RANK_LOST: Final = "RANK_LOST"
    SESSION_ENDED: Final = "SESSION_ENDED"
    STREAM_ENDED: Final = "STREAM_ENDED"
    SUPERSEDED: Final = "SUPERSEDED"

    # ---- Layouts

    ALREADY_REGISTERED: Final = "ALREADY_REGISTERED"
    ARENA_NOT_POPULATED: Final = "ARENA_NOT_POPULATED"
    LAYOUT_MISMATCH: Final = "LAYOUT_MISMATCH"
    LAYOUT_REFUSED: Final = "LAYOUT_REFUSED"
    LAYOUT_RELEASED: Final = "LAYOUT_RELEASED"
    LAYOUT_REPLACED: Final = "LAYOUT_REPLACED"
    LAYOUT_TIMEOUT: Final = "LAYOUT_TIMEOUT"
    RANKS_LEFT: Final = "RANKS_LEFT"
    UNKNOWN_BUCKET: Final = "UNKNOWN_BUCKET"
    UNKNOWN_CHANNEL: Final = "UNKNOWN_CHANNEL"
    UNKNOWN_LAYOUT: Final = "UNKNOWN_LAYOUT"
    UNKNOWN_PARAMETER: Final = "UNKNOWN_PARAMETER"

    # ---- Steps

    ALREADY_READY: Final = "ALREADY_READY"
    STALE_STEP: Final = "STALE_STEP"
    STEP_ABANDONED: Final = "STEP_ABANDONED"
    STEP_IN_DOUBT: Final = "STEP_IN_DOUBT"
    STEP_TIMEOUT: Final = "STEP_TIMEOUT"
    STEP_VOID: Final = "STEP_VOID"
    WAIT_TIMEOUT: Final = "WAIT_TIMEOUT"

    # ---- The state of the model

    POSITION_MISMATCH: Final = "POSITION_MISMATCH"
    RANKS_DIVERGED: Final = "RANKS_DIVERGED"
    STATE_INTERRUPTED: Final = "STATE_INTERRUPTED"
    STATE_REFUSED: Final = "STATE_REFUSED"
    STATE_UNAVAILABLE: Final = "STATE_UNAVAILABLE"

    # ---- Barrier, Broadcast, AllReduce

    OPERATION_MISMATCH: Final = "OPERATION_MISMATCH"
    OPERATION_TIMEOUT: Final = "OPERATION_TIMEOUT"
    UNKNOWN_RANK: Final = "UNKNOWN_RANK"

    # ---- GPUs

    BAD_STREAM: Final = "BAD_STREAM"
    CAPTURING: Final = "CAPTURING"
    CUDA_DRIVER_MISSING: Final = "CUDA_DRIVER_MISSING"
    CUDA_DRIVER_TOO_OLD: Final = "CUDA_DRIVER_TOO_OLD"
    CUDA_ERROR: Final = "CUDA_ERROR"
    CUDA_NOT_BUILT: Final = "CUDA_NOT_BUILT"
    CUDA_UNAVAILABLE: Final = "CUDA_UNAVAILABLE"
    GPU_EXCLUSIVE: Final = "GPU_EXCLUSIVE"
    GPU_FAULT: Final = "GPU_FAULT"
    GPU_NOT_VISIBLE: Final = "GPU_NOT_VISIBLE"
    GPU_OUT_OF_MEMORY: Final = "GPU_OUT_OF_MEMORY"
    GPU_TIMEOUT: Final = "GPU_TIMEOUT"
    GPU_UNSUPPORTED: Final = "GPU_UNSUPPORTED"
    GPU_UNUSABLE: Final = "GPU_UNUSABLE"
    MPS_FULL: Final = "MPS_FULL"
    MPS_OTHER_USER: Final = "MPS_OTHER_USER"
    NCCL_CUDA_ERROR: Final = "NCCL_CUDA_ERROR"
    NCCL_ERROR: Final = "NCCL_ERROR"
    NCCL_MISSING: Final = "NCCL_MISSING"
    NCCL_REMOTE_LOST: Final = "NCCL_REMOTE_LOST"
    NCCL_TIMEOUT: Final = "NCCL_TIMEOUT"
    NCCL_TOO_OLD: Final = "NCCL_TOO_OLD"
    WORKER_LOST: Final = "WORKER_LOST"
    WORKER_RESTARTING: Final = "WORKER_RESTARTING"
    WORKERS_STARTING: Final = "WORKERS_STARTING"

    # ---- Several nodes

    COORDINATOR_LOST: Final = "COORDINATOR_LOST"
    COORDINATOR_REFUSED: Final = "COORDINATOR_REFUSED"
    COORDINATOR_UNREACHABLE: Final = "COORDINATOR_UNREACHABLE"
    ENGINE_BROKEN: Final = "ENGINE_BROKEN"
    ENGINE_CLOSED: Final = "ENGINE_CLOSED"
    ENGINE_FAILED: Final = "ENGINE_FAILED"
    ENGINE_LOST: Final = "ENGINE_LOST"
    ENGINE_PEER_LOST: Final = "ENGINE_PEER_LOST"
    ENGINE_TIMEOUT: Final = "ENGINE_TIMEOUT"
    NODE_LOST: Final = "NODE_LOST"
    NODE_MISMATCH: Final = "NODE_MISMATCH"
    PEER_REFUSED: Final = "PEER_REFUSED"
