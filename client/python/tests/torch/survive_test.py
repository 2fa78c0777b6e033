"""Ranks that are killed are replaced, and every number of the training stays the same.

The training has all that could make a difference: dropout, BatchNorm, an extra state, Adam, a
scheduler per batch, accumulation of two, other data on each rank, random changes of the samples.
Each rank logs SHA-256
of averages and of state after every step. The whole log must equal that of a training without hold
and without a death.
"""

import collections
import hashlib
import json
import os
import pathlib
import random
import re
import signal

import pytest
import torch

# The first step of an optimizer imports it: a second for each rank, if not before the fork.
import torch._dynamo  # noqa: F401
from models import SMALL_BUCKETS
from ranks import RankFailed, Ranks, run_ranks
from torch import nn

PAGE = pathlib.Path(__file__).parents[4] / "docs" / "survive-a-lost-rank.md"
RANKS = 3
EPOCHS = 3
STEPS = 12  # 8 batches of each rank and epoch
STEPS_OF_EPOCH = STEPS // EPOCHS


class Samples(torch.utils.data.Dataset):
    """Each sample is changed at random each time."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        features = torch.randn(6, generator=numbers) + 0.1 * torch.randn(6) + random.random()
        return features, index % 4


class Counting(nn.Module):
    """Counts its forward passes in a state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self._passes = 0
        self._factors = torch.ones(4)

    def forward(self, hidden):
        self._passes += 1
        self._factors = self._factors * 1.01
        return hidden * self._factors[self._passes % 4]

    def get_extra_state(self):
        return {"passes": self._passes, "factors": (self._factors,)}

    def set_extra_state(self, state):
        self._passes = state["passes"]
        (self._factors,) = state["factors"]


class Model(nn.Module):
    def __init__(self, at):
        super().__init__()
        self._at = at
        self.first = nn.Linear(6, 24)
        self.norm = nn.BatchNorm1d(24)
        self.second = nn.Linear(24, 16)
        self.dropout = nn.Dropout(0.3)
        self.counting = Counting()
        self.last = nn.Linear(16, 4)
        self.never_used = nn.Linear(2, 2)

    def forward(self, features):
        hidden = self.dropout(torch.relu(self.norm(self.first(features))))
        self._at("forward")
        return self.last(torch.relu(self.second(self.counting(hidden))))


class Rank:
    """One rank of the training; dies where `deaths` says: (rank, its restarts, place, step).

    After `done` steps it goes on from the checkpoint that is beside the folder.
    """

    def __init__(self, policy, deaths, folder, done):
        import gradsync.torch
        from gradsync.torch.training import Training

        torch.set_num_threads(1)
        self.restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.rank = int(os.environ["RANK"])
        self._deaths = deaths
        self._log = open(pathlib.Path(folder) / f"{self.rank}-{self.restarts}", "w")
        self._checkpoint = pathlib.Path(folder).parent / "checkpoint"
        self._done = done
        self.step = done + 1
        self._kill_at_calls(gradsync, Training)
        options = {"hold_timeout": 60.0} if policy == "hold" else {}
        self.session = gradsync.torch.init(
            on_rank_loss=policy, step_timeout=60.0, connect_timeout=60.0, **options
        )
        torch.manual_seed(7 + 100 * self.restarts)  # what a replacement begins with does not count
        module = Model(self.at)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        self._module, self._optimizer, self._scheduler = module, optimizer, scheduler
        if done:
            parts = torch.load(self._checkpoint)
            for part, state in zip((module, optimizer, scheduler), parts):
                part.load_state_dict(state)
        model = gradsync.torch.DistributedDataParallel(module, **SMALL_BUCKETS)
        self.training = Training(
            model,
            optimizer,
            scheduler=scheduler,
            seed=5,
            accumulate=2,
            start=(done // STEPS_OF_EPOCH, 2 * (done % STEPS_OF_EPOCH)),
        )

    def at(self, place):
        """Dies here if that is due."""
        if (self.rank, self.restarts, place, self.step) in self._deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def _kill_at_calls(self, gradsync, training_type):
        """Dies around calls of the library, too."""

        def around(owner, name, before, after):
            call = getattr(owner, name)

            def run(*arguments, **options):
                self.at(before)
                result = call(*arguments, **options)
                self.at(after)
                return result

            setattr(owner, name, run)

        around(gradsync.Layout, "mark_ready", "before mark", "after mark")
        around(gradsync.Layout, "finish_step", "before end", "after end")
        around(gradsync.Session, "fetch_state", "before fetch", "after fetch")
        around(gradsync.Session, "confirm_state", "loaded", "confirmed")
        around(training_type, "_read", "reading", "read")

    def train(self, last):
        """Trains until step `last` is complete.

        Returns how often this rank was started, and the digest of the final state.
        """
        for _ in self._steps():
            if self.step == last < STEPS:
                break
        self.at("training done")
        if last < STEPS and self.rank == 0:
            parts = self._module, self._optimizer, self._scheduler
            torch.save([part.state_dict() for part in parts], self._checkpoint)
        self.training.model.leave()
        return self.restarts, digest(self._state())

    def _steps(self):
        """Yields after every complete step."""
        training = self.training
        data = training.seeded(Samples())
        sampler = torch.utils.data.DistributedSampler(data, RANKS, self.rank)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        layouts = training.model._synchronizer.buckets
        for epoch in training.epochs(EPOCHS):
            for features, targets in training.batches(loader):
                self.step = self._done + layouts.layout.next_step
                with training.accumulating():
                    output = training.model(features)
                    nn.functional.cross_entropy(output, targets).backward()
                if not training.ends_window:
                    continue
                self.at("verdict")
                self._write("averages", [p.grad for p in training.model.parameters()])
                training.model.clip_grad_norm_(1.0)
                self._optimizer.step()
                self.at("updated")
                self._scheduler.step()
                self._optimizer.zero_grad()
                self._write("state", self._state())
                self.at("step done")
                yield
            self.at(f"epoch {epoch} done")
            if not self._deaths:
                training.check_in_sync()

    def _state(self):
        model = self.training.model.module.state_dict().values()
        optimizer = sorted(self._optimizer.state_dict()["state"].items())
        scheduler = self._scheduler.last_epoch, self._scheduler.get_last_lr()
        return [*model, *(part[name] for _, part in optimizer for name in sorted(part)), *scheduler]

    def _write(self, what, values):
        positions = self.training._synchronizer.positions
        place = None if positions is None else positions.current
        self._log.write(json.dumps([self.step, what, place, digest(values)]) + "\n")
        self._log.flush()


def digest(values):
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            sha.update(value.detach().contiguous().numpy().tobytes())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()[:16]


def train(policy, deaths, folder, done, last):
    return Rank(policy, deaths, folder, done).train(last)


Run = collections.namedtuple("Run", "ends logs")


def run(folder, policy, deaths=(), done=0, last=STEPS):
    """Trains. Returns what each rank returned, and {(rank, restarts): {(step, what): digest}}."""
    most = max((restarts + 1 for _, restarts, _, _ in deaths), default=0)
    words = (policy, deaths, str(folder), done, last)
    ranks = Ranks(train, RANKS, *words, timeout=100, restarts=most)
    ends = ranks.results()
    logs = {}
    for path in folder.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        whose = tuple(map(int, path.name.split("-")))
        logs[whose] = {(step, what): told for step, what, _, told in lines}
    return Run(ends, logs)


@pytest.fixture(scope="module")
def faultless(daemon, tmp_path_factory):
    """The training without hold and without a death."""
    done = run(tmp_path_factory.mktemp("faultless"), "abort")
    assert [len(log) for log in done.logs.values()] == [2 * STEPS] * RANKS
    return done


def assert_same(done, faultless, deaths):
    for (rank, restarts), log in done.logs.items():
        expected = faultless.logs[rank, 0]
        different = [place for place, told in log.items() if told != expected[place]]
        assert not different, f"rank {rank}, started again {restarts} times: {different}"
    died = collections.Counter(rank for rank, *_ in deaths)
    assert [restarts for restarts, _ in done.ends] == [died[rank] for rank in range(RANKS)]
    assert [state for _, state in done.ends] == [state for _, state in faultless.ends]
    for rank in range(RANKS):
        states = [
            place
            for (r, _), log in done.logs.items()
            for place in log
            if r == rank and place[1] == "state"
        ]
        # A rank that dies between update and log has no line, and neither has its replacement.
        missing = STEPS - len(set(states))
        assert missing <= died[rank], (rank, sorted(states))
        assert len(set(states)) == len(states), "a step was done twice"


def test_without_a_death_hold_changes_nothing(faultless, tmp_path):
    done = run(tmp_path, "hold")
    assert done == faultless


@pytest.mark.parametrize("policy, deaths", [("abort", ()), ("hold", [(1, 0, "forward", 9)])])
def test_a_training_goes_on_from_a_checkpoint(faultless, tmp_path, policy, deaths):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    first = run(before, policy, last=6)  # in the middle of an epoch
    second = run(after, policy, deaths, done=6)
    assert [state for _, state in second.ends] == [state for _, state in faultless.ends]
    for rank in range(RANKS):
        chain = {**first.logs[rank, 0], **second.logs[rank, 0], **second.logs.get((rank, 1), {})}
        assert chain == faultless.logs[rank, 0]


SINGLE = [
    (2, 0, "forward", 3),
    (1, 0, "after mark", 4),
    (0, 0, "before end", 5),
    (2, 1, "after end", 6),
    (1, 1, "verdict", 7),
    (0, 1, "updated", 8),
    (2, 2, "epoch 1 done", 8),
    (1, 2, "step done", 9),
    (0, 2, "before mark", 10),
    (2, 3, "training done", 12),
]


def test_deaths_one_after_the_other(faultless, tmp_path):
    assert_same(run(tmp_path, "hold", SINGLE), faultless, SINGLE)


# A replacement's step is 1 until its first batch.
TOGETHER = [
    (1, 0, "forward", 3),
    (2, 0, "forward", 3),
    (1, 1, "after fetch", 1),
    (1, 2, "loaded", 1),
    (2, 1, "confirmed", 1),
    (0, 0, "forward", 6),
    (1, 3, "reading", 6),
    (2, 2, "after end", 8),
    (0, 1, "after mark", 8),
    (0, 2, "training done", 12),
    (1, 4, "training done", 12),
]


def test_deaths_at_once_and_of_those_who_heal(faultless, tmp_path):
    assert_same(run(tmp_path, "hold", TOGETHER), faultless, TOGETHER)


def a_death_after_the_last_step():
    """Rank 1 dies before it ends its last epoch.

    Returns:
      The epochs that this process has ended, and those of its scheduler.
    """
    import gradsync.torch

    torch.set_num_threads(1)
    gradsync.torch.init(on_rank_loss="hold")
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    training = gradsync.torch.Training(module, optimizer, scheduler=scheduler)
    ended = []
    for epoch in training.epochs(2):
        for batch in training.batches([torch.ones(1, 3)] * 3):
            training.model(batch).sum().backward()
            optimizer.step()
        if (os.environ["RANK"], epoch) == ("1", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step()
        ended.append(epoch)
    training.model.leave()
    return ended, scheduler.last_epoch


def test_a_replacement_does_not_repeat_what_follows_the_last_step(daemon):
    ranks = Ranks(a_death_after_the_last_step, 2, timeout=100, restarts=1)
    assert ranks.results() == [([0, 1], 2), ([], 2)]


# ---- The page


def run_page():
    """The script of docs/survive-a-lost-rank.md; returns the digest of the parameters."""
    text = PAGE.read_text()
    script = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE).group(1)
    there = {}
    exec(script, there)
    there["training"].check_in_sync()
    return digest(there["layers"].parameters())


def test_the_script_of_the_page(daemon):
    assert len(set(run_ranks(run_page, 2))) == 1


# ---- Ranks that differ


def one_rank_differs():
    import gradsync.torch

    torch.set_num_threads(1)
    gradsync.torch.init()
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    training = gradsync.torch.Training(module, optimizer)
    training.check_in_sync()
    training.model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    training.check_in_sync()
    if os.environ["RANK"] == "1":
        next(iter(optimizer.state.values()))["exp_avg"][0, 0] += 1
    try:
        training.check_in_sync()
    except gradsync.FailedPreconditionError as error:
        return f"{error.reason}: {error}"


def test_an_error_says_where_ranks_differ(daemon):
    for told in run_ranks(one_rank_differs, 2):
        assert re.match("RANKS_DIVERGED: .*optimizer/state/0/exp_avg", told), told


def void_step():
    """Rank 1 fails in a backward pass, then in a forward pass.

    Returns:
      The running mean before and after.
    """
    import gradsync.torch

    torch.set_num_threads(1)
    gradsync.torch.init(on_rank_loss="hold")
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Counting(), nn.Linear(4, 2))
    model = gradsync.torch.DistributedDataParallel(module)
    training = gradsync.torch.Training(model, torch.optim.SGD(module.parameters(), 0.1))

    def step(batch):
        training.position(0, batch)
        model(torch.randn(8, 3)).sum().backward()

    def broken(*_):
        raise ZeroDivisionError

    for batch in range(3):
        step(batch)
    before = module[1].running_mean.tolist()
    if os.environ["RANK"] == "1":
        # The other rank learns of it when the next forward pass begins.
        for register in (module[0].weight.register_hook, module[3].register_forward_pre_hook):
            handle = register(broken)
            with pytest.raises(ZeroDivisionError):
                step(3)
            handle.remove()
    else:
        with pytest.raises(gradsync.AbortedError):
            step(3)
    training.position(0, 3)
    training.check_in_sync()
    after = module[1].running_mean.tolist()
    model.leave()
    return before, after


def test_a_void_step_changes_no_buffer(daemon):
    for before, after in run_ranks(void_step, 2):
        assert before == after


# ---- What is refused


def refusals():
    """{case: the error of each}."""
    import gradsync.torch
    from gradsync.torch import DistributedDataParallel as Wrapper
    from gradsync.torch import Training, _hold

    torch.set_num_threads(1)
    jobs = iter(range(100))

    def join(**options):
        return gradsync.Session.join(
            **{"on_rank_loss": "hold", "job_id": f"{os.getpid()}-{next(jobs)}", **options}
        )

    def module():
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    def training(**options):
        model = Wrapper(module(), session=join())
        return Training(model, sgd(model), **options)

    def step(model):
        model(torch.randn(4, 3)).sum().backward()

    def states_from_the_trainer():
        Wrapper(module(), session=join(state_source="trainer"))

    def buffers_of_its_own():
        Wrapper(module(), session=join(), broadcast_buffers=False)

    def a_second_module():
        session = join()
        first = Wrapper(module(), session=session)
        Wrapper(module(), session=session)
        del first

    def a_second_training():
        first = training()
        Training(first.model, sgd(first.model))

    def ignored_parameters():
        ignoring = module()
        ignoring._ddp_params_and_buffers_to_ignore = ["0.bias"]
        Wrapper(ignoring, session=join())

    def an_optimizer_in_the_backward_pass():
        model = module()
        model[0].weight._in_backward_optimizers = []
        Wrapper(model, session=join())

    def an_extra_state_that_cannot_travel():
        Wrapper(nn.Sequential(nn.Linear(3, 2), OddExtra()), session=join())

    def an_extra_state_that_cannot_be_loaded():
        Wrapper(nn.Sequential(nn.Linear(3, 2), UnloadableExtra()), session=join())

    def device_verdict():
        Wrapper(module(), session=join(), device_verdict=True)

    def a_parameter_elsewhere():  # asked directly: no GPU is needed
        _hold.check_wrapping(join(), nn.Linear(3, 2, device="meta"), (), True, False)

    def two_modules_in_one_pass():
        first, second = training(), training()
        first.position(0, 0)
        second.position(0, 0)
        both = first.model(torch.randn(4, 3)) + second.model(torch.randn(4, 3))
        both.sum().backward()

    def no_training():
        step(Wrapper(module(), session=join()))

    def no_position():
        step(training().model)

    def one_position_for_two_steps():
        there = training()
        there.position(0, 0)
        step(there.model)
        step(there.model)

    def an_update_after_the_position():
        there = training()
        there.position(0, 0)
        with torch.no_grad():
            there.model.module[0].weight.mul_(2)
        step(there.model)

    def a_rate_after_the_position():
        there = training()
        there.position(0, 0)
        there._shared.optimizer.param_groups[0]["lr"] = 0.2
        step(there.model)

    def a_gradient_that_was_not_averaged():
        there = training()
        there.position(0, 0)
        with there.model.no_sync():
            step(there.model)
        there.position(0, 1)
        step(there.model)

    def a_state_that_cannot_travel():
        training(extra={"odd": OddState()})

    def batches_twice():
        there = training()
        for _ in there.epochs(1):
            list(there.batches([]))
            list(there.batches([]))

    def a_process_group_after_the_wrapper():
        there = training()
        alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("gloo", **alone)
        try:
            there.position(0, 0)
        finally:
            torch.distributed.destroy_process_group()

    def pytorchs_wrapper():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        model = nn.parallel.DistributedDataParallel(module())
        model.register_comm_hook(gradsync.torch.HookState(join()), gradsync.torch.allreduce_hook)
        step(model)

    def a_process_group():  # the one of the case above
        Wrapper(module(), session=join())

    told = {}
    for name, case in list(locals().items()):
        if name in CASES:
            try:
                case()
            except Exception as error:
                told[name] = f"{getattr(error, 'reason', type(error).__name__)}: {error}"
    return told


class OddState:
    def state_dict(self):
        return {"inside": object()}

    def load_state_dict(self, state):
        pass


class UnloadableExtra(nn.Module):
    def get_extra_state(self):
        return 7


class OddExtra(UnloadableExtra):
    def get_extra_state(self):
        return {"inside": object()}

    def set_extra_state(self, state):
        pass


CASES = {
    "states_from_the_trainer": "LOSS_POLICY: .*state_source",
    "buffers_of_its_own": "LOSS_POLICY: .*'1.running_mean' is not synchronized",
    "a_second_module": "LOSS_POLICY: .*one wrapped module",
    "a_second_training": "LOSS_POLICY: .*one Training",
    "ignored_parameters": "LOSS_POLICY: .*'0.bias' is in _ddp_params_and_buffers_to_ignore",
    "an_optimizer_in_the_backward_pass": "LOSS_POLICY: .*'0.weight'",
    "an_extra_state_that_cannot_travel": "LOSS_POLICY: .*'1._extra_state/inside' is a object",
    "an_extra_state_that_cannot_be_loaded": "LOSS_POLICY: .*UnloadableExtra of '1._extra_state'",
    "device_verdict": "LOSS_POLICY: .*the host must know each step's verdict",
    "a_parameter_elsewhere": "LOSS_POLICY: .*parameter 'weight' is on meta",
    "two_modules_in_one_pass": "LOSS_POLICY: .*cannot train in one backward pass",
    "no_training": "LOSS_POLICY: .*gradsync.torch.Training",
    "no_position": "PROTOCOL_VIOLATION: .*no position was given",
    "one_position_for_two_steps": "PROTOCOL_VIOLATION: .*no position was given",
    "an_update_after_the_position": "PROTOCOL_VIOLATION: .*'0.weight' has changed",
    "a_rate_after_the_position": "PROTOCOL_VIOLATION: .*'state/optimizer/0/lr' has changed",
    "a_gradient_that_was_not_averaged": "PROTOCOL_VIOLATION: .*'0.weight' has a gradient of a pass",
    "a_state_that_cannot_travel": "TypeError: .*'extra.odd/inside' is a object",
    "batches_twice": "RuntimeError: .*once in each turn",
    "a_process_group_after_the_wrapper": "LOSS_POLICY: .*process group",
    "pytorchs_wrapper": "LOSS_POLICY: .*PyTorch's own wrapper",
    "a_process_group": "LOSS_POLICY: .*process group",
}


@pytest.fixture(scope="module")
def told(daemon):
    return run_ranks(refusals, 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_training_that_cannot_replace_ranks_is_refused(told, case):
    assert re.match(CASES[case], told.get(case, "nothing was refused")), told.get(case)


def with_a_state_that_cannot_travel():
    """With "abort", nothing has to travel. Returns what check_in_sync() says."""
    import gradsync.torch

    torch.set_num_threads(1)
    gradsync.torch.init()
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.param_groups[0]["where"] = torch.device("cpu")
    training = gradsync.torch.Training(module, optimizer)
    for _ in training.epochs(1):
        for _ in training.batches(range(2)):
            training.model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    try:
        training.check_in_sync()
    except TypeError as error:
        return str(error)


def test_a_state_that_cannot_travel_is_welcome_without_replacements(daemon):
    assert (
        "'optimizer/param_groups/0/where' is a device"
        in run_ranks(with_a_state_that_cannot_travel, 1)[0]
    )


def with_another_model(policy, deaths, folder):
    """Rank 1 dies, and comes back with a wider layer."""
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(on_rank_loss="hold", hold_timeout=60.0, step_timeout=60.0)
    module = nn.Linear(3, 2 if not session.is_replacement else 4)
    training = gradsync.torch.Training(module, torch.optim.SGD(module.parameters(), 0.1))
    for _ in training.epochs(1):
        for at in training.batches(range(6)):
            if at == 3 and session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            training.model(torch.ones(1, 3)).sum().backward()


def test_a_replacement_with_another_model_is_refused(daemon, tmp_path):
    ranks = Ranks(with_another_model, 2, "hold", (), str(tmp_path), timeout=60, restarts=1)
    with pytest.raises(RankFailed, match="rank 1:[^$]*'weight' of shape .2, 3., float32, but here"):
        ranks.results()


# ---- Ranks that leave


def leaves_early():
    """Rank 1 leaves after three steps. Returns each rank's error."""
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(on_rank_loss="hold", step_timeout=60.0)
    module = nn.Linear(3, 2)
    training = gradsync.torch.Training(module, torch.optim.SGD(module.parameters(), 0.1))
    try:
        for _ in training.epochs(1):
            for at in training.batches(range(6)):
                if at == 3 and session.rank == 1:
                    training.model.leave()
                    return "left"
                training.model(torch.ones(1, 3)).sum().backward()
    except gradsync.AbortedError as error:
        return f"{error.reason}: {error}"


def test_an_error_names_the_rank_that_leaves_early(daemon):
    for error in run_ranks(leaves_early, 2):
        assert re.match(
            "RANK_FINISHED: .*rank 1 of job '.*' left .* ago, and rank 0 has begun step 4 of "
            "layout 'ddp0'",
            error,
        ), error


def leaves_on_the_way_of_an_exception(policy):
    """What leave() and finish() raise in `finally` blocks, and how many steps became void."""
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(on_rank_loss=policy)
    module = nn.Linear(3, 2)
    training = gradsync.torch.Training(module, torch.optim.SGD(module.parameters(), 0.1))

    def broken(*_):
        raise ZeroDivisionError

    def step():
        training.position(0, 0)
        output = training.model(torch.ones(1, 3))
        module.bias.register_hook(broken)
        output.sum().backward()

    def told(work, leave):
        try:
            try:
                work()
            finally:
                leave()
        except Exception as error:
            context = type(error.__context__).__name__
            return f"{getattr(error, 'reason', '')} {type(error).__name__} {context}: {error}"

    answers = [told(step, training.model.leave)]
    if not session.ended:
        answers += [told(broken, session.leave), told(broken, session.finish)]
        answers.append(session.statistics().steps_void)
        training.model.leave()
    return answers


def test_an_exception_that_passes_a_leave_is_not_a_clean_leave(daemon):
    ((*refused, void),) = run_ranks(leaves_on_the_way_of_an_exception, 1, "hold")
    assert len(refused) == 3 and void == 0
    for told, call in zip(refused, ("leave", "leave", "finish")):
        assert re.match(
            "PROTOCOL_VIOLATION FailedPreconditionError ZeroDivisionError: .*rank 0: "
            rf"{call}\(\) was called while ZeroDivisionError is handled",
            told,
        ), told


def test_without_hold_a_rank_may_leave_on_the_way_of_an_exception(daemon):
    (told,) = run_ranks(leaves_on_the_way_of_an_exception, 1, "abort")
    assert len(told) == 1 and " ZeroDivisionError " in told[0]
