"""What a training needs to be healed, without a daemon: its state, its seeds, its batches."""

import ctypes
import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler


def bytes_of(items):
    return {name: ctypes.string_at(memory.address, memory.nbytes) for name, memory in items}


def through_an_image(state):
    """What arrives, and the JSON that has travelled."""
    from gradsync.torch import _state_image

    items = bytes_of(_state_image.to_items(state))
    arrived = _state_image.from_items({name: memoryview(data) for name, data in items.items()})
    assert bytes_of(_state_image.to_items(arrived)) == items
    return arrived, items.pop("state.json"), items


# ---- States


def test_a_state_arrives_with_every_bit_and_type():
    odd = {
        "text": "é",
        "numbers": [1, -0.0, 0.1, float("inf"), 2**70],
        "pair": (0.9, (True, None)),
        "by number": {3: "three", 1: {"inner": torch.arange(3)}},
        "$tuple": "a key that looks like a mark",
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "complex": torch.tensor([1 + 2j]),
    }
    arrived, _, _ = through_an_image({"odd": odd})
    assert arrived["odd"].keys() == odd.keys()
    for name, value in odd.items():
        got = arrived["odd"][name]
        if isinstance(value, torch.Tensor):
            assert got.dtype == value.dtype and torch.equal(got, value), name
        elif name == "by number":
            assert got.keys() == value.keys() and got[3] == "three"
            assert torch.equal(got[1]["inner"], value[1]["inner"])
        else:
            assert repr(got) == repr(value), name


def test_equal_states_have_equal_texts_in_any_order():
    _, one, tensors = through_an_image({"a": {"x": 1, "y": (2.0,)}, "b": {1: 0, 0: 1}})
    _, other, _ = through_an_image({"b": {0: 1, 1: 0}, "a": {"y": (2.0,), "x": 1}})
    assert one == other and not tensors
    for different in ({"a": {"x": 1.0, "y": (2.0,)}}, {"a": {"x": 1, "y": [2.0]}}):
        _, text, _ = through_an_image({"b": {0: 1, 1: 0}, **different})
        assert text != one
    json.loads(one)


@pytest.mark.parametrize(
    "value, what",
    [
        (torch.device("cpu"), "'optimizer/groups/0/where' is a device"),
        (np.float32(1), "'optimizer/groups/0/where' is a float32"),
        (lambda: 0, "'optimizer/groups/0/where' is a function"),
        ({(1, 2): 0}, r"'optimizer/groups/0/where/\(1, 2\)' is a tuple"),
        (torch.eye(2).to_sparse(), "'optimizer/groups/0/where' is a torch.sparse_coo tensor"),
    ],
)
def test_a_value_that_cannot_travel_is_named(value, what):
    from gradsync.torch import _state_image

    with pytest.raises(TypeError, match=what):
        _state_image.to_items({"optimizer": {"groups": [{"where": value}]}})


def test_items_that_do_not_belong_together_are_refused():
    from gradsync.torch import _state_image

    items = bytes_of(_state_image.to_items({"a": torch.ones(2), "b": torch.ones(3)}))
    for broken, what in [
        ({**items, "a": b"1234"}, "'a' of the state of the model has 4 bytes"),
        ({k: v for k, v in items.items() if k != "b"}, "wrong item 'b'"),
        ({**items, "c": b""}, "wrong item 'c'"),
        ({}, "no item 'state.json'"),
    ]:
        with pytest.raises(ValueError, match=what):
            _state_image.from_items(broken)


def parts(seed, optimizer_type):
    from gradsync.torch._shared_state import SharedState

    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.PReLU())
    optimizer = optimizer_type(module.parameters())
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [2],
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    average = torch.optim.swa_utils.AveragedModel(module)
    shared = SharedState(module, optimizer, scheduler, scaler, {"average": average})

    def step():
        optimizer.zero_grad()
        scaler.scale(module(torch.randn(4, 2, 3, 3)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(module)

    return shared, step


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replacement_goes_on_with_the_same_bits(optimizer_type):
    survivor, step_survivor = parts(1, optimizer_type)
    replacement, step_replacement = parts(2, optimizer_type)
    for _ in range(3):
        step_survivor()
    arrived, text, tensors = through_an_image(survivor.read())
    replacement.load(arrived)
    assert through_an_image(replacement.read())[1:] == (text, tensors)
    for step in (step_survivor, step_replacement):
        torch.manual_seed(3)
        for _ in range(3):
            step()
    ends = [through_an_image(shared.read())[1:] for shared in (survivor, replacement)]
    assert ends[0] == ends[1]


def test_a_replacement_with_other_parts_is_refused():
    import gradsync

    survivor, _ = parts(1, torch.optim.Adam)
    replacement, _ = parts(1, torch.optim.Adam)
    state = survivor.read()
    for wrong, what in [
        ({k: v for k, v in state.items() if k != "scaler"}, "survivors have no part 'scaler'"),
        ({**state, "parameters": {}}, "survivors have no parameter '0.bias'"),
        ({**state, "extra.ema": {}}, "this rank has no part 'extra.ema'"),
    ]:
        with pytest.raises(gradsync.FailedPreconditionError, match=what) as error:
            replacement.load(wrong)
        assert error.value.reason == gradsync.Reason.STATE_REFUSED


class Counting(nn.Module):
    """Has an extra state."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes
        self.factors = torch.full((2,), float(passes))

    def get_extra_state(self):
        return {"passes": self.passes, "factors": (self.factors,)}

    def set_extra_state(self, state):
        self.passes = state["passes"]
        (self.factors,) = state["factors"]


def test_extra_states_arrive_and_a_copy_stays_as_it_was():
    from gradsync.torch._extra_states import ExtraStates

    survivor = nn.Sequential(nn.Linear(1, 1), Counting(3), nn.Sequential(Counting(4)))
    states = ExtraStates(survivor)
    assert states.why_not() is None
    copy = states.copy()
    survivor[1].passes += 1
    survivor[1].factors.add_(1)
    replacement = nn.Sequential(nn.Linear(1, 1), Counting(0), nn.Sequential(Counting(0)))
    arrived, text, tensors = through_an_image(copy)
    assert arrived.keys() == {"1._extra_state", "2.0._extra_state"}
    ExtraStates(replacement).load(arrived)
    assert (replacement[1].passes, replacement[1].factors.tolist()) == (3, [3, 3])
    assert replacement[2][0].passes == 4
    assert through_an_image(ExtraStates(replacement).read())[1:] == (text, tensors)


def test_a_replacement_with_other_extra_states_is_refused():
    import gradsync
    from gradsync.torch._extra_states import ExtraStates

    with pytest.raises(gradsync.FailedPreconditionError, match="extra state '0._extra_state'"):
        ExtraStates(nn.Sequential(Counting(0))).load({})


def frozen(change):
    """The name of what `change` has changed."""
    from gradsync.torch._frozen_state import FrozenState

    shared, step = parts(1, OPTIMIZERS["adam"])
    step()
    state = FrozenState(shared)
    state.record()
    assert state.changed() is None
    change(shared, step)
    return state.changed()


def momentum_of(shared):
    return next(iter(shared.optimizer.state.values()))["exp_avg"]


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda shared, step: step(), "state/optimizer/0/lr"),
        (lambda shared, _: shared.parameters()["1.weight"].detach().add_(1), "1.weight"),
        (lambda shared, _: momentum_of(shared).zero_(), "optimizer state 0/exp_avg"),
        (lambda shared, _: shared.optimizer.state.clear(), "state of the optimizer"),
        (lambda shared, _: shared._stateful["scaler"].update(8.0), "state/scaler/scale"),
    ],
)
def test_a_change_after_the_position_is_named(change, name):
    assert frozen(change) == name


# ---- Seeds


def draws():
    numbers = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    return repr(numbers)


def test_every_generator_follows_from_the_place_alone():
    from gradsync.torch._seeds import seed_generators

    seen = {}
    for place in [(0, 1, 2, "step", 3), (0, 1, 2, "batch", 3), (0, 2, 2, "step", 3)]:
        seed_generators(*place)
        seen[place] = draws()
        draws()
        seed_generators(*place)
        assert draws() == seen[place]
    assert len(set(seen.values())) == len(seen)


# ---- Batches


class Noisy(Dataset):
    """Samples that draw from every generator."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read += 1
        return index + random.random() + np.random.rand() + torch.rand(()).item()


def seeded(dataset=None):
    from gradsync.torch._seeded_dataset import SeededDataset

    return SeededDataset(dataset or Noisy(), 5, 1)


def whole_run(make_loader, epochs=3):
    """{(epoch, batch): what a loop sees there}; computing draws numbers, too."""
    from gradsync.torch._loader_passes import LoaderPasses

    loader, passes, seen = make_loader(), LoaderPasses(5, 1), {}
    for epoch in range(epochs):
        for index, batch in passes.begin(loader, epoch, 0):
            seen[epoch, index] = batch.tolist()
            draws()
    return seen


LOADERS = {
    "plain": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), 3, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "sampler": lambda: DataLoader(
        Noisy(), 3, sampler=RandomSampler(range(10), generator=torch.Generator().manual_seed(8))
    ),
    "distributed": lambda: DataLoader(Noisy(), 3, sampler=DistributedSampler(range(10), 2, 1)),
    "seeded": lambda: DataLoader(seeded(), batch_size=3, shuffle=True),
    "list": lambda: [torch.tensor(i) for i in range(4)],
}


@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_a_replacement_sees_what_the_lost_rank_would_have_seen(make_loader):
    from gradsync.torch._loader_passes import LoaderPasses

    expected = whole_run(make_loader)
    for epoch, skip in [(0, 1), (1, 0), (1, 2), (2, 3), (2, 4)]:
        random.seed(9)
        loader, passes, seen = make_loader(), LoaderPasses(5, 1), {}
        for at in range(epoch, 3):
            for index, batch in passes.begin(loader, at, skip if at == epoch else 0):
                seen[at, index] = batch.tolist()
        assert seen == {place: v for place, v in expected.items() if place >= (epoch, skip)}


def test_batches_that_are_done_are_not_read_from_a_seeded_dataset():
    from gradsync.torch._loader_passes import LoaderPasses

    for dataset, read in [(Noisy(), 10), (seeded(Noisy()), 4)]:
        loader = DataLoader(dataset, batch_size=3)
        assert len(list(LoaderPasses(5, 1).begin(loader, 0, 2))) == 2
        assert getattr(dataset, "_dataset", dataset).read == read


def test_workers_read_the_same_samples_as_the_training_process():
    def with_workers():
        return DataLoader(
            seeded(), 3, shuffle=True, num_workers=2, persistent_workers=True,
            multiprocessing_context="fork",
        )  # fmt: skip

    assert whole_run(with_workers, 2) == whole_run(LOADERS["seeded"], 2)


@pytest.mark.parametrize(
    "options, what",
    [({"persistent_workers": True}, "live for several epochs"), ({"in_order": False}, "in_order")],
)
def test_loaders_whose_batches_cannot_be_repeated_are_refused(options, what):
    from gradsync.torch._loader_passes import LoaderPasses

    loader = DataLoader(Noisy(), num_workers=1, **options)
    with pytest.raises(ValueError, match=what):
        next(LoaderPasses(5, 1).begin(loader, 0, 0))
