"""Some training steps of a whole job, event by event.

Each rank computes forward, then backward bucket by bucket, and hands a bucket over when its last
gradient is there. Then the backend decides:

  nccl, gloo   when every rank has handed bucket b over, and b-1 has been issued, an all-reduce over
               a ring of all ranks
  gradsync     when every rank of a node has handed it over, the node's reduce threads combine them
               in memory. With several nodes one exchange per node follows, in index order, and the
               reduce threads write the average back. Both go chunk by chunk: the first chunk is
               summed before the exchange, the last one is written back after it, and all other work
               of the reduce threads runs beside it. A commit round trip ends the step

Queues: a node's reduce threads serve one bucket at a time, a lane carries one collective at a time,
and the links (all nodes' at once, since a ring moves in step; both directions at once) one transfer
at a time. With one lane latencies and transfers follow each other; with more, one collective's
latency hides behind another's transfer (the paper's round-robin process groups).
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Optional

from . import bucket_layout
from .collective import Cost, ring_all_reduce
from .model import Model
from .profile import Compute, Profile, Refused
from .simulator import Process, Resource, Signal, Simulator

# Backward's part of the time of forward and backward. Backward multiplies twice where forward
# multiplies once: for the gradient of the input and for that of the weights.
FORWARD_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Setup:
    """The job to simulate.

    Attributes:
      model: the model to train.
      profile: the machines.
      backend: one of profile.backends.
      ranks: their number; they fill one node after the other.
      bucket_cap: bytes; 0 gives each tensor a bucket.
      first_bucket_cap: bytes; bucket_cap, where that is smaller.
      overlap: True if buckets leave during backward, False if all leave after it.
      sync_every: every such step synchronizes; the others only accumulate gradients.
      lanes: how many collectives may run at the same time.
      steps: how many to run; a multiple of sync_every.
      seed: for the jitter.
      compute: replaces the profile's.
      ranks_of_node: replaces the profile's.
    """

    model: Model
    profile: Profile
    backend: str
    ranks: int
    bucket_cap: int = bucket_layout.CAP_BYTES
    first_bucket_cap: int = bucket_layout.FIRST_CAP_BYTES
    overlap: bool = True
    sync_every: int = 1
    lanes: int = 1
    steps: int = 4
    seed: int = 1
    compute: Optional[Compute] = None
    ranks_of_node: Optional[int] = None

    def nodes(self) -> list[int]:
        """How many ranks each node has."""
        most = self.ranks_of_node or int(self.profile.get("node.ranks"))
        full, rest = divmod(self.ranks, most)
        return [most] * full + ([rest] if rest else [])


@dataclasses.dataclass(frozen=True)
class Result:
    """The times and bytes of a run.

    Attributes:
      step: seconds, the mean over ranks and steps.
      compute: seconds of a step without synchronization and jitter.
      buckets: bytes of each bucket.
      communication: seconds of all collectives of a step, if each runs alone.
      link_bytes: bytes that each node sent, per synchronized step.
      total_bytes: bytes that all members sent, per synchronized step.
      reduced_bytes: bytes that all reduce threads read and wrote, per synchronized step.
    """

    step: float
    compute: float
    buckets: tuple[int, ...]
    communication: float
    link_bytes: float
    total_bytes: float
    reduced_bytes: float


def run(setup: Setup) -> Result:
    """Simulates the job; Refused if the profile lacks a cost."""
    if setup.ranks < 1 or setup.lanes < 1 or setup.sync_every < 1 or setup.steps < 1:
        raise Refused("ranks, lanes, steps and the interval of synchronization are at least 1")
    if setup.steps % setup.sync_every:
        raise Refused("the steps must be a multiple of the interval of synchronization")
    return _Run(setup).result()


class _Step:
    """One synchronized step, while it runs."""

    def __init__(self, buckets: int, nodes: int) -> None:
        self.handed = [[0] * buckets for _ in range(nodes)]
        self.nodes_ready = [0] * buckets
        self.next_to_issue = 0
        self.undone = buckets * nodes
        self.ends = 0
        self.last_end = 0.0
        self.done = Signal()


class _Run:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.simulator = Simulator()
        self.nodes = setup.nodes()
        profile = setup.profile
        ring = profile.ring(setup.backend)
        self.buckets = bucket_layout.plan(
            setup.model.sizes, setup.bucket_cap, min(setup.first_bucket_cap, setup.bucket_cap)
        )
        self.sizes = [bucket.nbytes for bucket in self.buckets]
        self.compute = setup.compute or profile.compute(setup.model.name)
        working = self.compute.step - self.compute.optimizer
        if working < 0:
            raise Refused("the optimizer takes longer than the step")
        self.forward = working * FORWARD_SHARE
        shares = setup.model.backward_shares()
        self.chunks = [
            working * (1 - FORWARD_SHARE) * sum(shares[index] for index in bucket.parameters)
            for bucket in self.buckets
        ]
        self.per_tensor = profile.get(f"{setup.backend}.per_tensor", 0.0)
        self.sigma = profile.get("straggler.sigma", 0.0)
        self.steal = profile.get("node.steal", 0.0)
        self.hierarchical = setup.backend == "gradsync"
        # The share of a bucket that is summed before its exchange and written back after it.
        chunk = profile.get("gradsync.chunk", math.inf)
        self.exposed = [min(1.0, chunk / size) if size else 1.0 for size in self.sizes]
        self.reduce_threads = [Resource() for _ in self.nodes]
        self.lanes = [Resource() for _ in range(setup.lanes)]
        self.links = Resource()
        members = [1] * len(self.nodes) if self.hierarchical else self.nodes
        self.costs: list[Cost] = [ring_all_reduce(size, members, ring) for size in self.sizes]
        self.running: dict[int, _Step] = {}
        self.debts = [0.0] * setup.ranks
        self.computing = [False] * setup.ranks
        self.duration = 0.0
        self.link_bytes = self.total_bytes = self.reduced_bytes = 0.0

    def result(self) -> Result:
        rank = 0
        for node, count in enumerate(self.nodes):
            for _ in range(count):
                self.simulator.start(self._trainer(rank, node))
                rank += 1
        self.simulator.run()
        setup = self.setup
        synchronized = setup.steps // setup.sync_every
        return Result(
            step=self.duration / setup.ranks / setup.steps,
            compute=self.compute.step,
            buckets=tuple(self.sizes),
            communication=sum(cost.seconds for cost in self.costs),
            link_bytes=self.link_bytes / synchronized,
            total_bytes=self.total_bytes / synchronized,
            reduced_bytes=self.reduced_bytes / synchronized,
        )

    # ---- A trainer ----

    def _trainer(self, rank: int, node: int) -> Process:
        setup = self.setup
        # Each rank has its own generator: more ranks do not change the jitter of the others.
        jitter = random.Random(f"{setup.seed}:{rank}")
        hand_off = setup.profile.get("gradsync.hand_off", 0.0) if self.hierarchical else 0.0
        for step in range(setup.steps):
            begin = self.simulator.now
            slowness = math.exp(jitter.gauss(0.0, self.sigma) - self.sigma**2 / 2)
            synchronized = (step + 1) % setup.sync_every == 0
            self.computing[rank] = True
            yield from self._compute(rank, self.forward * slowness)
            for index, chunk in enumerate(self.chunks):
                yield from self._compute(rank, chunk * slowness)
                if synchronized:
                    yield self.per_tensor * len(self.buckets[index].parameters)
                if synchronized and setup.overlap:
                    yield hand_off
                    self._hand_over(step, index, node)
            self.computing[rank] = False
            if synchronized:
                if not setup.overlap:
                    for index in range(len(self.buckets)):
                        yield hand_off
                        self._hand_over(step, index, node)
                yield self._end_step(step).done
            yield self.compute.optimizer
            self.duration += self.simulator.now - begin

    def _compute(self, rank: int, seconds: float) -> Process:
        """Takes `seconds`, and as long again as the reduce threads used this rank's core."""
        yield seconds
        while self.debts[rank] > 0:
            debt, self.debts[rank] = self.debts[rank], 0.0
            yield debt

    # ---- A step ----

    def _step(self, step: int) -> _Step:
        if step not in self.running:
            self.running[step] = _Step(len(self.buckets), len(self.nodes))
        return self.running[step]

    def _hand_over(self, step: int, bucket: int, node: int) -> None:
        """A rank of `node` hands the bucket over."""
        state = self._step(step)
        state.handed[node][bucket] += 1
        if state.handed[node][bucket] < self.nodes[node]:
            return
        if self.hierarchical:
            # The message arrives after half of a round trip.
            arrives = self.setup.profile.get("gradsync.empty") / 2
            process = self._combine(step, bucket, node)
            self.simulator.after(arrives, lambda: self.simulator.start(process))
        else:
            self._node_ready(step, bucket)

    def _combine(self, step: int, bucket: int, node: int) -> Process:
        ranks = self.nodes[node]
        if len(self.nodes) == 1:
            # One pass: every arena is read and the average written into it.
            yield from self._reduce(bucket, node, 2 * ranks)
            self._done(step, node)
            return
        # To the coordinator, and its launch back.
        yield self.setup.profile.get("gradsync.peer")
        if ranks > 1:
            yield from self._reduce(bucket, node, (ranks + 1) * self.exposed[bucket])
        self._node_ready(step, bucket)

    def _node_ready(self, step: int, bucket: int) -> None:
        state = self._step(step)
        state.nodes_ready[bucket] += 1
        while state.next_to_issue < len(self.buckets) and state.nodes_ready[
            state.next_to_issue
        ] == len(self.nodes):
            self.simulator.start(self._exchange(step, state.next_to_issue))
            state.next_to_issue += 1

    def _exchange(self, step: int, bucket: int) -> Process:
        lane = self.lanes[bucket % len(self.lanes)]
        cost = self.costs[bucket]
        yield lane.acquire()
        if self.hierarchical and self.exposed[bucket] < 1:
            for node, ranks in enumerate(self.nodes):
                if ranks > 1:
                    passes = 2 * (ranks + 1) * (1 - self.exposed[bucket])
                    self.simulator.start(self._reduce(bucket, node, passes))
        yield cost.latency
        yield from self.links.use(cost.transfer)
        lane.release()
        self.link_bytes += cost.link_bytes
        self.total_bytes += cost.total_bytes
        for node, ranks in enumerate(self.nodes):
            if self.hierarchical and ranks > 1:
                self.simulator.start(self._write_back(step, bucket, node))
            else:
                self._done(step, node)

    def _write_back(self, step: int, bucket: int, node: int) -> Process:
        passes = (self.nodes[node] + 1) * self.exposed[bucket]
        yield from self._reduce(bucket, node, passes)
        self._done(step, node)

    def _reduce(self, bucket: int, node: int, passes: float) -> Process:
        """The reduce threads read or write the bucket `passes` times."""
        profile = self.setup.profile
        traffic = passes * self.sizes[bucket]
        if traffic == 0:
            return
        threads = self.reduce_threads[node]
        seconds = profile.get("gradsync.wake") + traffic / profile.get("gradsync.reduce")
        yield threads.acquire()
        first = sum(self.nodes[:node])
        for rank in range(first, first + self.nodes[node]):
            if self.computing[rank]:
                self.debts[rank] += self.steal * seconds
        yield seconds
        threads.release()
        self.reduced_bytes += traffic

    def _done(self, step: int, node: int) -> None:
        state = self._step(step)
        state.undone -= 1
        self._try_to_commit(state)

    def _end_step(self, step: int) -> _Step:
        """One rank has handed all its buckets over."""
        state = self._step(step)
        state.ends += 1
        state.last_end = self.simulator.now
        self._try_to_commit(state)
        return state

    def _try_to_commit(self, state: _Step) -> None:
        if state.undone or state.ends < self.setup.ranks:
            return
        delay = 0.0
        if self.hierarchical:
            profile = self.setup.profile
            commit = profile.get("gradsync.commit")
            # EndStep may have arrived long before the last bucket was done; StepDone goes back.
            arrives = max(self.simulator.now, state.last_end + commit / 2)
            delay = arrives - self.simulator.now + commit / 2
            if len(self.nodes) > 1:
                delay += profile.get("gradsync.peer")
        self.simulator.after(delay, state.done.fire)
