"""One trial: a few lines that every rank of a job runs, with a wrapper around its model.

Many trials share one set of rank processes, because starting PyTorch takes longer than most trials.
They share no state: each has its own gradsync job, process group and random numbers. The ranks meet
after each trial, so a failed trial does not affect the next one.

    @trial()                      # registers it; by default for every wrapper
    def average(t):
        model = t.wrap(nn.Linear(3, 1))
        ...

    test_average = trials_test(__name__)    # one pytest case per trial and wrapper
"""

import contextlib
import copy
import dataclasses
import datetime
import hashlib
import io
import pickle
import random

import torch

# The first step of an optimizer imports it: a second for each rank, if not before the fork.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from torch import nn

# What a trial can put around its model.
WRAPPER = "wrapper"  # gradsync.torch.DistributedDataParallel
HOOK = "hook"  # PyTorch's wrapper with gradsync.torch.allreduce_hook
PYTORCH = "pytorch"  # PyTorch's wrapper on Gloo: does it behave as the trial says?
GROUP = "group"  # PyTorch's wrapper on the process group "gradsync"

ALL = (WRAPPER, HOOK, PYTORCH)

# No trial waits longer than this for another rank. Generous: on a busy machine the first
# torch.compile of a process takes half a minute.
LIMIT = datetime.timedelta(seconds=120)


class Skipped(Exception):
    """This machine or PyTorch lacks what the trial needs."""


def trial(*wrappers, world_size=2):
    """Registers a function of a Trial, which runs with each of `wrappers` (none given: all)."""

    def register(function):
        function.wrappers = wrappers or ALL
        function.world_size = world_size
        return function

    return register


def parameters_of(module):
    return [p for p in module.parameters() if p.requires_grad]


class Trial:
    """What a trial works with; each rank has one for each trial."""

    def __init__(self, name, wrapper, store, rank, world_size):
        self.name = name
        self.wrapper = wrapper
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(f"{wrapper}/{name}", store)
        self._exchanges = 0
        self._sessions = []
        random.seed(4711)
        torch.manual_seed(4711)

    # -- Wrapping --------------------------------------------------------------------------------

    @property
    def ours(self):
        return self.wrapper == WRAPPER

    def wrap(self, module, *, session=None, **options):
        if self.ours:
            import gradsync.torch

            session = session or self.session()
            return gradsync.torch.DistributedDataParallel(module, session=session, **options)
        options.pop("first_bucket_cap_mb", None)
        model = self.pytorch(module, **options)
        if self.wrapper == HOOK:
            import gradsync.torch

            state = gradsync.torch.HookState(session or self.session())
            model.register_comm_hook(state, gradsync.torch.allreduce_hook)
        return model

    def pytorch(self, module, **options):
        """PyTorch's own wrapper on the trial's process group."""
        self.process_group()
        return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **options)

    def session(self, **options):
        """A session of the trial's own job. Without options it is always the first one."""
        if not options and self._sessions:
            return self._sessions[0]
        import gradsync

        settings = gradsync.SessionOptions.from_environment()
        job = f"{self.wrapper}/{self.name}/{len(self._sessions)}/{settings.job_id}"
        limit = LIMIT.total_seconds()
        settings = dataclasses.replace(
            settings, job_id=job[:128], step_timeout=limit, connect_timeout=limit
        )
        self._sessions.append(gradsync.Session.join(dataclasses.replace(settings, **options)))
        return self._sessions[-1]

    def join_again(self, session):
        """A session of the same rank in the same job."""
        import gradsync

        self._sessions.append(gradsync.Session.join(session.options))
        return self._sessions[-1]

    def process_group(self, backend=None):
        """Args: backend: None: the wrapper's."""
        if not dist.is_initialized():
            import gradsync.torch  # noqa: F401  # makes "gradsync" known

            dist.init_process_group(
                backend or ("gradsync" if self.wrapper == GROUP else "gloo"),
                store=dist.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=LIMIT,
            )

    def end(self, failed):
        """Ends sessions and process group; if `failed`, without waiting for other ranks."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            if not failed and not session.closed:
                with contextlib.suppress(Exception):
                    session.leave()
            session.close()
        self._store.set(f"ended/{self.rank}", b"")
        if dist.is_initialized():
            if not failed:
                # A rank that is still connecting would find this one gone.
                self._store.wait([f"ended/{rank}" for rank in range(self.world_size)], LIMIT)
            dist.destroy_process_group()

    # -- What the other ranks have ---------------------------------------------------------------

    def gather(self, value):
        """`value` of every rank, in rank order."""
        self._exchanges += 1
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._store.set(f"{self._exchanges}/{self.rank}", buffer.getvalue())
        values = []
        for rank in range(self.world_size):
            key = f"{self._exchanges}/{rank}"
            self._store.wait([key], LIMIT)
            values.append(torch.load(io.BytesIO(self._store.get(key)), weights_only=False))
        return values

    def meet(self):
        self.gather(None)

    def mean(self, tensor):
        """The average over the ranks, computed without gradsync."""
        tensors = self.gather(tensor.detach().clone())
        return (sum(t.double() for t in tensors) / self.world_size).to(tensor.dtype)

    def means(self, tensors):
        everyone = self.gather([t.detach().clone() for t in tensors])
        return [
            (sum(t.double() for t in same) / self.world_size).to(same[0].dtype)
            for same in zip(*everyone)
        ]

    def rng(self, seed=0):
        """Random numbers that differ between the ranks."""
        return torch.Generator().manual_seed(1000 * (self.rank + 1) + seed)

    def randn(self, *shape, seed=0, dtype=torch.float32):
        """Data that differs between the ranks and is the same in every run."""
        return torch.randn(*shape, generator=self.rng(seed)).to(dtype)

    # -- What must hold --------------------------------------------------------------------------

    def same_bits(self, tensors, what="tensors"):
        """Asserts that every rank has the same bits."""
        digests = self.gather([digest(t) for t in tensors])
        for rank, other in enumerate(digests):
            assert other == digests[0], f"{what} differ between rank 0 and rank {rank}: " + str(
                [i for i, (a, b) in enumerate(zip(digests[0], other)) if a != b]
            )

    def train(self, model, loss, what=""):
        """As backward(), with fresh gradients."""
        model.zero_grad(set_to_none=True)
        self.backward(model, loss, what)

    def backward(self, model, loss, what=""):
        """Runs a step; asserts that the gradients of its `loss(model)` are the averages."""
        local = local_gradients(model.module, loss)
        loss(model).backward()
        self.synchronized(model, local, what)

    def synchronized(self, model, local, what=""):
        """Asserts that the gradients of `model` are the averages of the ranks' `local`."""
        parameters = parameters_of(model)
        expected = self.means(local)
        assert len(expected) == len(parameters), (len(expected), len(parameters))
        for index, (parameter, gradient) in enumerate(zip(parameters, expected)):
            assert parameter.grad is not None, f"parameter {index} has no gradient {what}"
            close(parameter.grad, gradient, f"parameter {index} {what}")
        self.same_bits([p.grad for p in parameters], f"gradients {what}")

    @contextlib.contextmanager
    def raises(self, *types, match=()):
        """Like pytest.raises, which ranks do not have; yields a list that gets the exception."""
        caught = []
        try:
            yield caught
        except types as error:
            caught.append(error)
            text = str(error).lower()
            for word in [match] if isinstance(match, str) else match:
                assert word.lower() in text, f"no {word!r} in: {error}"
            return
        raise AssertionError(f"nothing was raised, expected {[t.__name__ for t in types]}")


def digest(tensor):
    data = tensor.detach().contiguous().reshape(-1)
    what = str(tensor.dtype), tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(pickle.dumps(what)).hexdigest()


def close(actual, expected, what="", rtol=None, atol=None):
    if rtol is None:
        rtol, atol = {
            torch.float64: (1e-10, 1e-12),
            torch.float32: (1e-5, 1e-6),
            torch.float16: (2e-3, 1e-3),
            torch.bfloat16: (2e-2, 1e-2),
        }[expected.dtype]
    torch.testing.assert_close(
        actual.detach(), expected, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def local_gradients(module, *losses):
    """The gradients of a copy of `module` from all `losses`, which are functions of the module."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.grad = None
    for loss in losses:
        loss(module).backward()
    return [
        torch.zeros_like(p) if p.grad is None else p.grad
        for p in module.parameters()
        if p.requires_grad
    ]


def squares(t, seed=0, inputs=6):
    """A loss of a module with `inputs` inputs, on this rank's data."""
    data = t.randn(4, inputs, seed=seed)
    return lambda module: module(data).float().pow(2).mean()
