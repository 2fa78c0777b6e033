"""How a rank joins its job."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Optional

from gradsync import _duration, _structs, _text, errors
from gradsync._library import library, raise_error
from gradsync.reason import Reason

_LOSS_POLICIES = {"abort": 1, "hold": 2, "continue": 3}
_STATE_SOURCES = {"survivor": 1, "trainer": 2}
_DIVISORS = {"live_ranks": 1, "world": 2}
_NCCL_ALGORITHMS = {
    "auto": 0,
    "tree": 1,
    "ring": 2,
    "collnet_direct": 3,
    "collnet_chain": 4,
    "nvls": 5,
    "nvls_tree": 6,
}
_NCCL_PROTOCOLS = {"auto": 0, "ll": 1, "ll128": 2, "simple": 3}
_NCCL_WIRE_TYPES = {"auto": 0, "same": 1, "bfloat16": 2, "float16": 3}


@dataclasses.dataclass
class SessionOptions:
    """Options of Session.join().

    Attributes:
      socket: path of the daemon's socket.
      job_id: the job, the same on every rank; 1 to 128 printable characters.
      token: a secret that keeps jobs of one user apart; "" for none.
      rank: this process's rank, from 0.
      world_size: number of ranks of the job.
      on_rank_loss: what happens when a rank is lost. "abort" ends the job. With "hold" the running
        step waits until another process takes the rank's place. "continue" is not built yet: the
        daemon refuses it.
      state_source: with "hold": who gives that process the state of the model. "survivor": a rank
        that has it, see Session.serve_state(). "trainer": the trainers themselves, for example from
        a file that each rank writes after every step.
      hold_timeout: with "hold": seconds for which the other ranks wait for a lost one in one step,
        before the job ends; None: 10 min.
      divisor: what averages are divided by: "live_ranks" or "world".
      step_timeout: seconds from a step's first mark_ready() until the step is void on every rank;
        None: the daemon's option step_timeout, 30 min unless it is set.
      connect_timeout: seconds to try again while no daemon listens, while the coordinator cannot be
        reached, and with "hold" while another process has the rank; None: 60 s; 0: one attempt.
      coordinator: "host" or "host:port" of the daemon on rank 0's node, the same on every rank; ""
        for a job on one node.
      nccl_max_ctas: most thread blocks of NCCL's kernels, 1 to 64; fewer leave more of the GPU to
        the trainers. None: NCCL's choice. This option and the next three are for gradients on GPUs,
        and the same on every rank.
      nccl_algorithm: "auto" (NCCL's choice), "tree", "ring", "collnet_direct", "collnet_chain",
        "nvls" or "nvls_tree".
      nccl_protocol: "auto" (NCCL's choice), "ll", "ll128" or "simple".
      nccl_wire_type: the type in which gradients are summed between GPUs.
        "auto": 16-bit types as float32, others in their own type.
        "same": every type as itself. For 16-bit types that is half the bytes of "auto", and sums
        are rounded at every GPU on the way.
        "bfloat16", "float16": float32 in that type: half the bytes, and sums are rounded at every
        GPU. Other types as themselves.
    """

    socket: str = "/run/gradsync/gradsyncd.sock"
    job_id: str = ""
    token: str = ""
    rank: int = 0
    world_size: int = 1
    on_rank_loss: str = "abort"
    state_source: str = "survivor"
    hold_timeout: Optional[float] = None
    divisor: str = "live_ranks"
    step_timeout: Optional[float] = None
    connect_timeout: Optional[float] = None
    coordinator: str = ""
    nccl_max_ctas: Optional[int] = None
    nccl_algorithm: str = "auto"
    nccl_protocol: str = "auto"
    nccl_wire_type: str = "auto"

    @classmethod
    def from_environment(cls, **options: Any) -> SessionOptions:
        """Options from the environment variables that torchrun sets, and from gradsync's own.

        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, except those whose option is
        given: `job_id` stands for the last two. TORCHELASTIC_RUN_ID, GRADSYNC_SOCKET and
        GRADSYNC_JOB_TOKEN are read if they are set. The coordinator is GRADSYNC_COORDINATOR. If
        that is not set, it is MASTER_ADDR, or "" if LOCAL_WORLD_SIZE says that every rank is on
        this node, or MASTER_ADDR is not set.

        Args:
          **options: fields of SessionOptions. Each wins over its variable.

        Raises:
          InvalidArgumentError: a variable is missing or malformed; the message names it and the
            option. Or a given option is malformed.
        """
        struct = cls(**options)._struct()
        # An option that is not given is unset, so that the library reads its variable.
        for name in ("socket", "job_id", "token", "coordinator"):
            if name not in options:
                setattr(struct, name, None)
        if "world_size" not in options:
            struct.world_size = 0
        elif struct.world_size == 0:
            raise _malformed("world_size", "is 0")
        struct.rank_given = "rank" in options
        if error := library.options_from_environment(struct):
            raise_error(error)
        try:
            found = {
                "socket": struct.socket.decode(),
                "job_id": struct.job_id.decode(),
                "token": struct.token.decode(),
                "rank": struct.rank,
                "world_size": struct.world_size,
                "coordinator": struct.coordinator.decode(),
            }
            return cls(**{**found, **options})
        finally:
            library.options_destroy(struct)

    def _struct(self) -> _structs.SessionOptionsStruct:
        for name in ("rank", "world_size"):
            if not 0 <= getattr(self, name) < 2**32:
                raise _malformed(name, f"is {getattr(self, name)}; give a number from 0")
        struct = _structs.SessionOptionsStruct(ctypes.sizeof(_structs.SessionOptionsStruct))
        struct.socket = _text.encode(self.socket, "SessionOptions.socket")
        struct.job_id = _text.encode(self.job_id, "SessionOptions.job_id")
        struct.token = _text.encode(self.token, "SessionOptions.token")
        struct.coordinator = _text.encode(self.coordinator, "SessionOptions.coordinator")
        struct.rank = self.rank
        struct.world_size = self.world_size
        struct.on_rank_loss = _choice("on_rank_loss", self.on_rank_loss, _LOSS_POLICIES)
        struct.state_source = _choice("state_source", self.state_source, _STATE_SOURCES)
        struct.hold_timeout = _duration.nanoseconds(
            self.hold_timeout, "SessionOptions.hold_timeout", default=0
        )
        if self.hold_timeout is not None and struct.hold_timeout == 0:
            raise _malformed("hold_timeout", "is 0; give more seconds, or None")
        struct.divisor = _choice("divisor", self.divisor, _DIVISORS)
        if self.nccl_max_ctas is not None:
            if not 0 < self.nccl_max_ctas < 2**32:
                raise _malformed("nccl_max_ctas", f"is {self.nccl_max_ctas}; give 1 to 64, or None")
            struct.nccl_max_ctas = self.nccl_max_ctas
        struct.nccl_algorithm = _choice("nccl_algorithm", self.nccl_algorithm, _NCCL_ALGORITHMS)
        struct.nccl_protocol = _choice("nccl_protocol", self.nccl_protocol, _NCCL_PROTOCOLS)
        struct.nccl_wire_type = _choice("nccl_wire_type", self.nccl_wire_type, _NCCL_WIRE_TYPES)
        struct.step_timeout = _duration.nanoseconds(
            self.step_timeout, "SessionOptions.step_timeout", default=0
        )
        if self.step_timeout is not None and struct.step_timeout == 0:
            raise _malformed("step_timeout", "is 0; give more seconds, or None")
        struct.connect_timeout = _duration.nanoseconds(
            self.connect_timeout, "SessionOptions.connect_timeout", default=0
        )
        if self.connect_timeout is not None and struct.connect_timeout == 0:
            struct.connect_timeout = -1  # the library's "do not wait"
        return struct


def _choice(name: str, value: str, numbers: dict[str, int]) -> int:
    number = numbers.get(value)
    if number is None:
        raise _malformed(name, f"is {value!r}; give one of {', '.join(numbers)}")
    return number


def _malformed(name: str, what: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(f"SessionOptions.{name} {what}", reason=Reason.MALFORMED)
