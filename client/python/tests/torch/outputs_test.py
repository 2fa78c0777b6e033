"""Inputs and outputs of a wrapped module."""

import collections
import dataclasses
import types

import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import ALL, WRAPPER, local_gradients, trial
from trial_ranks import trials_test

Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Result:
    a: torch.Tensor
    b: torch.Tensor
    note: str = ""


class Opaque:
    """An output that hides its tensors from a wrapper."""

    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


SHAPES = {
    "tuple": (lambda a, b: (a, b), lambda o: (o[0], o[1])),
    "list": (lambda a, b: [a, b], lambda o: (o[0], o[1])),
    "dict": (lambda a, b: {"a": a, "b": b, "n": 3}, lambda o: (o["a"], o["b"])),
    "nested": (
        lambda a, b: (1, [{"x": (a, None)}], {"y": [b, "s"]}),
        lambda o: (o[1][0]["x"][0], o[2]["y"][0]),
    ),
    "namedtuple": (Pair, lambda o: (o.a, o.b)),
    "ordered": (
        lambda a, b: collections.OrderedDict(a=a, b=b),
        lambda o: (o["a"], o["b"]),
    ),
    "dataclass": (Result, lambda o: (o.a, o.b)),
    "opaque": (Opaque, lambda o: (o.a, o.b)),
    "namespace": (lambda a, b: types.SimpleNamespace(a=a, b=b), lambda o: (o.a, o.b)),
}


class Shaped(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.make, self.take = SHAPES[shape]
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return self.make(*[head(x) for head in self.heads])


def _shape_trial(shape, options, use_second=True):
    def trained(t):
        module = Shaped(shape)

        def loss(m, data):
            first, second = module.take(m(data))
            return first.pow(2).mean() + (second.pow(2).mean() if use_second else 0)

        model = t.wrap(module, **options, **SMALL_BUCKETS)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            data = t.randn(4, 6, seed=step)
            local = local_gradients(module, lambda m, d=data: loss(m, d))
            output = model(data)
            assert type(output) is type(module.make(1, 2)), type(output)
            loss(lambda _, o=output: o, data).backward()
            if use_second:
                t.synchronized(model, local, f"in step {step}")
            else:
                assert module.heads[1].weight.grad is None, f"step {step}: nobody used it"
                t.same_bits([module.trunk.weight.grad, module.heads[0].weight.grad])

    return trained


FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}

for _shape in SHAPES:
    # PyTorch's wrapper finds tensors in fewer types, and fails with these options then.
    known = _shape not in ("opaque", "namespace", "dataclass")
    globals()[f"gives_{_shape}"] = trial()(_shape_trial(_shape, {}))
    globals()[f"gives_{_shape}_finding_unused"] = trial(*(ALL if known else [WRAPPER]))(
        _shape_trial(_shape, FIND)
    )
    globals()[f"gives_{_shape}_in_a_static_graph"] = trial(*(ALL if known else [WRAPPER]))(
        _shape_trial(_shape, STATIC)
    )
    globals()[f"gives_{_shape}_and_the_loss_uses_half"] = trial(WRAPPER)(
        _shape_trial(_shape, FIND, use_second=False)
    )
del _shape, known


@trial()
def forward_may_take_any_arguments(t):
    taken = []

    class Taking(Mlp):
        def forward(self, x, *args, **kwargs):
            taken.append((type(x), [type(a) for a in args], sorted(kwargs)))
            return super().forward(x.a + x.b)

    model = t.wrap(Taking())
    for step in range(2):
        model.zero_grad(set_to_none=True)
        pair = Pair(t.randn(4, 6, seed=step), t.randn(4, 6, seed=step + 5))
        local = local_gradients(
            model.module, lambda m, p=pair: m(p, [1], Opaque(1, 2), key={}).pow(2).mean()
        )
        model(pair, [1], Opaque(1, 2), key={}).pow(2).mean().backward()
        t.synchronized(model, local)
    assert all(entry == (Pair, [list, Opaque], ["key"]) for entry in taken), taken


@trial()
def inputs_that_require_a_gradient_get_their_own(t):
    model = t.wrap(Mlp())
    inputs = t.randn(4, 6).requires_grad_()
    plain = inputs.detach().clone().requires_grad_()
    model.module(plain).pow(2).mean().backward()
    model.zero_grad(set_to_none=True)
    model(inputs).pow(2).mean().backward()
    torch.testing.assert_close(inputs.grad, plain.grad)


@trial(WRAPPER)
def forward_may_return_a_parameter(t):
    class Itself(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self):
            return self.weight

    model = t.wrap(Itself())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        (model() * (t.rank + step)).sum().backward()
        torch.testing.assert_close(
            model.module.weight.grad, torch.full((3,), step + (t.world_size - 1) / 2)
        )


@trial()
def an_output_changed_in_place(t):
    model = t.wrap(Mlp())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        data = t.randn(4, 6, seed=step)
        local = local_gradients(model.module, lambda m, d=data: (m(d) * 2).pow(2).mean())
        output = model(data)
        output *= 2
        output.pow(2).mean().backward()
        t.synchronized(model, local)


@trial()
def an_output_kept_over_many_steps(t):
    """Metrics can keep outputs alive without an effect on steps."""
    model, kept = t.wrap(Mlp()), []
    for step in range(4):
        model.zero_grad(set_to_none=True)
        data = t.randn(4, 6, seed=step)
        local = local_gradients(model.module, lambda m, d=data: m(d).pow(2).mean())
        kept.append(model(data))
        kept[-1].pow(2).mean().backward()
        t.synchronized(model, local)


test = trials_test(__name__)
