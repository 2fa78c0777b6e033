"""State dicts, copies and pickles of wrapped modules."""

import copy
import io
import pickle
from unittest import mock

import gradsync
import gradsync.torch
import torch
from gradsync.torch import _session
from models import SMALL_BUCKETS, Mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from trial import PYTORCH, WRAPPER, squares, trial
from trial_ranks import trials_test


@trial()
def a_state_dict_in_the_middle_of_training(t):
    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            squares(t, step)(model).backward()
            optimizer.step()

    def start():
        torch.manual_seed(3)
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    straight, optimizer = start()
    train(straight, optimizer, range(6))

    model, optimizer = start()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    fresh, optimizer = start()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(fresh, optimizer, range(3, 6))
    for one, other in zip(straight.parameters(), fresh.parameters()):
        assert torch.equal(one, other)


def same_parameters(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@trial(WRAPPER)
def state_dicts_have_the_keys_of_pytorchs_wrapper(t):
    ours, theirs = t.wrap(Mlp()), t.pytorch(Mlp())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.manual_seed(1)
    for source, target in ((t.pytorch(Mlp()), ours), (t.wrap(Mlp()), theirs)):
        assert not same_parameters(source, target)
        target.load_state_dict(source.state_dict())
        assert same_parameters(source, target)
    state = ours.state_dict()
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    plain = Mlp()
    plain.load_state_dict(state)
    assert same_parameters(plain, ours)
    with t.raises(RuntimeError, match="module.first.weight"):
        ours.load_state_dict({})
    t.backward(ours, squares(t))


class Versioned(nn.Linear):
    """Refuses a state dict of another version, as MNASNet of torchvision does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 2, local_metadata
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@trial(WRAPPER)
def a_module_finds_its_version_in_a_state_dict_of_the_bare_module(t):
    for module in (Versioned(2, 2), nn.Sequential(Versioned(2, 2))):
        model = t.wrap(module)
        state = module.state_dict()
        before = list(state), {path: dict(each) for path, each in state._metadata.items()}
        for value in state.values():
            value.data = torch.full_like(value, 3)
        for each in (state, model.state_dict()):
            assert str(model.load_state_dict(each)) == "<All keys matched successfully>"
        assert all((parameter == 3).all() for parameter in module.parameters())
        assert list(state) == before[0] and state._metadata.keys() == before[1].keys()


@trial(WRAPPER)
def a_state_dict_of_the_bare_module_fits(t):
    model, other = t.wrap(Mlp()), Mlp()
    model.load_state_dict(other.state_dict())
    assert same_parameters(model, other)
    with t.raises(RuntimeError, match=("unexpected", "odd")):
        model.load_state_dict({**other.state_dict(), "odd": torch.ones(1)})


def _checkpoint_trial(load):
    """torch.distributed.checkpoint's view of model and optimizer: the bare module's names."""

    def checkpointed(t):
        def start():
            model = t.wrap(Mlp(), **SMALL_BUCKETS)
            return model, torch.optim.Adam(model.parameters(), lr=0.01)

        def train(model, optimizer, steps):
            for step in steps:
                optimizer.zero_grad(set_to_none=True)
                squares(t, step)(model).backward()
                optimizer.step()

        torch.manual_seed(3)
        model, optimizer = start()
        train(model, optimizer, range(3))
        saved = copy.deepcopy(
            (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer))
        )
        assert list(saved[0]) == list(Mlp().state_dict())
        assert set(saved[1]["state"]) == set(saved[0])
        train(model, optimizer, range(3, 6))

        fresh, its_optimizer = start()
        load(fresh, its_optimizer, *saved)
        train(fresh, its_optimizer, range(3, 6))
        assert same_parameters(fresh, model)

    return checkpointed


def _load_both(model, optimizer, model_state, optimizer_state):
    set_model_state_dict(model, model_state)
    set_optimizer_state_dict(model, optimizer, optimizer_state)


def _load_together(model, optimizer, model_state, optimizer_state):
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(strict=True),
    )


checkpoints = trial()(_checkpoint_trial(_load_both))
checkpoints_of_both_at_once = trial()(_checkpoint_trial(_load_together))


@trial(WRAPPER)
def a_checkpoint_is_loaded_after_wrapping_again(t):
    """Loading makes the state of a new optimizer by a step of its own, on the ranks that need it.

    So does torch.distributed.checkpoint. The ranks must not take it for a step of training.
    """
    module = Mlp()
    model = t.wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    t.train(model, squares(t))
    optimizer.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    model.leave()
    if t.rank == 0:  # a new process
        module = Mlp()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = t.wrap(module, session=t.session(step_timeout=120.0))
    set_optimizer_state_dict(model, optimizer, saved)
    for step in range(1, 3):
        t.train(model, squares(t, step))
        optimizer.step()
    t.same_bits(model.parameters(), "parameters")


def _copies_trial(make):
    def copied(t):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        squares(t)(model).backward()
        other = make(model)
        for one, two in zip(model.parameters(), other.parameters()):
            assert torch.equal(one, two) and one is not two
        # The copy computes, and is in no job.
        with torch.no_grad():
            assert torch.equal(other(torch.ones(2, 6)), model(torch.ones(2, 6)))
        with t.raises(RuntimeError, match=("copy", "wrap")):
            squares(t)(other)
        # The original continues to train, and so does the copy's module when it is wrapped.
        again = t.wrap(other.module, **SMALL_BUCKETS)
        for trained in (model, again):
            t.train(trained, squares(t, 2))

    return copied


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


deep_copies = trial(WRAPPER)(_copies_trial(copy.deepcopy))
pickled_copies = trial(WRAPPER)(_copies_trial(lambda model: pickle.loads(pickle.dumps(model))))
copies_saved_by_torch = trial(WRAPPER)(_copies_trial(_saved))


def _copies_train_trial(make):
    """In the process's own session a copy trains like any wrapper, as with PyTorch's."""

    def trained(t):
        if t.ours:
            session = t.session()
            with mock.patch.object(_session, "_default", session):
                _train_copy(t, gradsync.torch.DistributedDataParallel(Mlp()), make)
        else:
            _train_copy(t, t.wrap(Mlp()), make)

    return trained


def _train_copy(t, model, make):
    squares(t)(model).backward()
    other = make(model)
    for step in range(2):
        for trained in (other, model):
            t.train(trained, squares(t, step))
    with other.no_sync():
        other.zero_grad()
        squares(t, 3)(other).backward()
    t.train(model, squares(t, 4))


copies_train = trial(WRAPPER, PYTORCH)(_copies_train_trial(copy.deepcopy))
pickles_train = trial(WRAPPER, PYTORCH)(
    _copies_train_trial(lambda model: pickle.loads(pickle.dumps(model)))
)


@trial(WRAPPER, PYTORCH)
def an_averaged_model(t):
    """torch.optim.swa_utils copies the wrapper, and only computes with it."""
    model = t.wrap(Mlp())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        t.train(model, squares(t, step))
        optimizer.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        assert averaged(torch.ones(1, 6)).shape == (1, 3)
    t.same_bits(averaged.module.parameters(), "averaged parameters")


_LINEAR = ("weight", "bias")


@trial(WRAPPER)
def state_within_another_module(t):
    outer = nn.ModuleDict({"inner": t.wrap(nn.Linear(3, 2)), "plain": nn.Linear(2, 2)})
    state = outer.state_dict()
    assert list(state) == [f"{name}.{k}" for name in ("inner.module", "plain") for k in _LINEAR]
    assert str(outer.load_state_dict(state)) == "<All keys matched successfully>"
    bare = {key.replace("module.", ""): value for key, value in state.items()}
    assert str(outer.load_state_dict(bare)) == "<All keys matched successfully>"


test = trials_test(__name__)
