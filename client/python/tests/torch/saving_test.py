"""State dicts, copies and pickles of wrapped modules."""

import copy
import io
import pickle

import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import WRAPPER, squares, trial
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


@trial(WRAPPER)
def state_dicts_are_the_modules_own(t):
    model = t.wrap(Mlp())
    assert list(model.state_dict()) == list(Mlp().state_dict())
    # Files that PyTorch's wrapper has written can be loaded, too.
    other = Mlp()
    model.load_state_dict({f"module.{k}": v for k, v in other.state_dict().items()})
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
    with t.raises(RuntimeError, match="first.weight"):
        model.load_state_dict({})
    t.backward(model, squares(t))


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


@trial(WRAPPER)
def state_within_another_module(t):
    outer = nn.ModuleDict({"inner": t.wrap(nn.Linear(3, 2)), "plain": nn.Linear(2, 2)})
    state = outer.state_dict()
    assert set(state) == {"inner.weight", "inner.bias", "plain.weight", "plain.bias"}
    assert str(outer.load_state_dict(state)) == "<All keys matched successfully>"


test = trials_test(__name__)
