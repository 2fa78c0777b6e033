"""Activation checkpointing of both kinds: a backward pass runs further backward passes."""

import types

from models import SMALL_BUCKETS, Checkpointed
from torch import nn
from torch.utils.checkpoint import checkpoint
from trial import WRAPPER, local_gradients, trial
from trial_ranks import trials_test


class Once(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


class Twice(Once):
    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.second, x, use_reentrant=self.use_reentrant)
        return x


class TwiceShared(Twice):
    def __init__(self, use_reentrant):
        super().__init__(use_reentrant)
        self.first.weight = self.second.weight


class Dynamic(Once):
    """Uses another one of two layers in each pass."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        layer = self.first if self.passes % 2 else self.second
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


class First(Once):
    """Begins with a checkpoint, so that its input has to require a gradient."""

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.use_reentrant))


def _trial(module, use_reentrant, **options):
    def trained(t):
        model = t.wrap(module(use_reentrant), **SMALL_BUCKETS, **options)
        for step in range(4):
            model.zero_grad(set_to_none=step != 2)
            data = t.randn(4, 6, seed=step).requires_grad_()
            t.backward(model, lambda m, d=data: m(d).pow(2).mean(), f"in step {step}")

    return trained


def _whole_trial(use_reentrant):
    """The wrapper itself is checkpointed."""

    def trained(t):
        layers = nn.Linear(6, 6), nn.Linear(6, 6)
        layers[0].weight = layers[1].weight
        model = t.wrap(nn.Sequential(*layers), **SMALL_BUCKETS)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            data = t.randn(4, 6, seed=step).requires_grad_()
            local = local_gradients(model.module, lambda m, d=data: m(d).pow(2).mean())
            checkpoint(model, data, use_reentrant=use_reentrant).pow(2).mean().backward()
            t.synchronized(model, local, f"in step {step}")

    return trained


for _kind, _reentrant in (("reentrant", True), ("not_reentrant", False)):
    globals()[f"once_{_kind}"] = trial()(_trial(Once, _reentrant))
    globals()[f"once_{_kind}_static"] = trial()(_trial(Once, _reentrant, static_graph=True))
    globals()[f"at_the_beginning_{_kind}"] = trial()(_trial(First, _reentrant))
    globals()[f"several_blocks_{_kind}"] = trial()(_trial(Checkpointed, _reentrant))
    globals()[f"twice_{_kind}_static"] = trial()(_trial(Twice, _reentrant, static_graph=True))
    globals()[f"twice_sharing_{_kind}_static"] = trial()(
        _trial(TwiceShared, _reentrant, static_graph=True)
    )
    globals()[f"whole_wrapper_{_kind}"] = trial()(_whole_trial(_reentrant))
del _kind, _reentrant

twice_not_reentrant = trial()(_trial(Twice, False))
twice_sharing_not_reentrant = trial()(_trial(TwiceShared, False))
once_not_reentrant_finding_unused = trial()(_trial(Once, False, find_unused_parameters=True))
# PyTorch's wrapper raises here ("marked ready twice"), ours needs no such option.
once_reentrant_finding_unused = trial(WRAPPER)(_trial(Once, True, find_unused_parameters=True))


@trial()
def a_dynamic_module_not_reentrant(t):
    model = t.wrap(Dynamic(False), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        model(t.randn(4, 6, seed=step)).pow(2).mean().backward()
        used, unused = (model.module.first, model.module.second)[:: 1 if step % 2 == 0 else -1]
        assert unused.weight.grad is None, f"step {step}"
        t.same_bits([used.weight.grad, used.bias.grad])


@trial()
def a_parameter_of_two_reentrant_checkpoints_is_named(t):
    """The parameter would get a second gradient after the first was handed over."""
    model = t.wrap(Twice(True), **SMALL_BUCKETS)
    words = ("second.",) if t.ours else ("ready",)
    with t.raises(RuntimeError, match=words):
        for _ in range(2):
            model(t.randn(4, 6).requires_grad_()).sum().backward()
    if t.ours:
        assert all(p.grad is None for p in model.parameters()), "no half average is left"


@trial(WRAPPER)
def accumulation_under_reentrant_checkpoints(t):
    model = t.wrap(Checkpointed(True), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        data = [t.randn(4, 6, seed=10 * step + i).requires_grad_() for i in range(2)]
        local = local_gradients(model.module, *[lambda m, d=d: m(d).pow(2).mean() for d in data])
        with model.no_sync():
            model(data[0]).pow(2).mean().backward()
        model(data[1]).pow(2).mean().backward()
        t.synchronized(model, local, f"in step {step}")


class Hidden(nn.Module):
    """Two checkpointed blocks whose loss the wrapper cannot find."""

    def __init__(self, hide, use_reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.hide = hide
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.hide(self, x.pow(2).mean())


class OfItsOwn:
    def __init__(self, loss):
        self.loss = loss


def _kept_by_the_module(module, loss):
    module.loss = loss


HIDING = {
    "custom_object": (lambda _, loss: OfItsOwn(loss), lambda _, output: output.loss),
    "namespace": (
        lambda _, loss: types.SimpleNamespace(loss=loss),
        lambda _, output: output.loss,
    ),
    "attribute": (_kept_by_the_module, lambda model, _: model.module.loss),
}


def _hidden_trial(kind, use_reentrant, **options):
    """The averages are right, or the pass is refused by name; none is silently partial."""
    hide, find = HIDING[kind]

    def trained(t):
        model = t.wrap(Hidden(hide, use_reentrant), **SMALL_BUCKETS, **options)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            data = t.randn(4, 6, seed=step).requires_grad_()
            if kind == "attribute" and use_reentrant:
                with t.raises(RuntimeError, match="use_reentrant=false"):
                    find(model, model(data)).backward()
                assert all(p.grad is None for p in model.parameters()), "a gradient is left"
                continue
            plain = Hidden(lambda _, loss: loss, use_reentrant)
            plain.load_state_dict(model.module.state_dict())
            local = local_gradients(plain, lambda m, d=data: m(d))
            find(model, model(data)).backward()
            t.synchronized(model, local, f"in step {step}")

    return trained


class HiddenShared(nn.Module):
    """One layer, used twice, holds every parameter: the first checkpoint's pass makes them all."""

    def __init__(self, first_outside):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.first_outside = first_outside

    def forward(self, x):
        x = self.layer(x) if self.first_outside else checkpoint(self.layer, x, use_reentrant=True)
        self.loss = checkpoint(self.layer, x, use_reentrant=True).pow(2).mean()


def _hidden_shared_trial(first_outside):
    def refused(t):
        model = t.wrap(HiddenShared(first_outside), **SMALL_BUCKETS)
        for step in range(3):
            model(t.randn(4, 6, seed=step).requires_grad_())
            with t.raises(RuntimeError, match="use_reentrant=false"):
                model.module.loss.backward()
            assert all(p.grad is None for p in model.parameters()), "a gradient is left"

    return refused


a_shared_layer_in_two_checkpoints_with_a_hidden_loss = trial(WRAPPER)(_hidden_shared_trial(False))
a_shared_layer_outside_and_in_a_checkpoint_with_a_hidden_loss = trial(WRAPPER)(
    _hidden_shared_trial(True)
)

for _kind in HIDING:
    for _reentrant in (True, False):
        _name = f"loss_in_{_kind}_{'reentrant' if _reentrant else 'not_reentrant'}"
        globals()[_name] = trial(WRAPPER)(_hidden_trial(_kind, _reentrant))
    globals()[f"loss_in_{_kind}_reentrant_static"] = trial(WRAPPER)(
        _hidden_trial(_kind, True, static_graph=True)
    )
del _kind, _reentrant, _name


test = trials_test(__name__)
