"""Modules that differ between the ranks: each rank's error says what differs."""

import torch
from bad_input import steps_are_right
from models import Cnn, Mlp
from torch import nn
from trial import WRAPPER, local_gradients, trial
from trial_ranks import trials_test


def _different_trial(make, *words, options=None):
    """`make(rank)` differs between the ranks; each rank's error says what differs."""

    def refused(t):
        session = t.session()
        with t.raises(ValueError, RuntimeError, match=(*words, "rank 0", "rank 1")):
            t.wrap(make(t.rank), session=session, **(options(t.rank) if options else {}))
        steps_are_right(t, t.wrap(Mlp(), session=session))

    return refused


def _with_buffer(rank):
    module = Mlp()
    module.register_buffer("table", torch.zeros(2 + rank))
    return module


def _reordered(rank):
    class Reordered(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("a", "b")[:: 1 if rank == 0 else -1]:
                setattr(self, name, nn.Linear(6, 6))

    return Reordered()


def _partly_frozen(rank):
    module = Mlp()
    module.second.weight.requires_grad_(rank == 0)
    return module


another_shape = trial(WRAPPER)(_different_trial(lambda rank: Mlp(hidden=8 + rank), "first.weight"))
another_dtype = trial(WRAPPER)(
    _different_trial(lambda rank: Mlp().to([torch.float32, torch.float64][rank]), "float64")
)
another_name = trial(WRAPPER)(
    _different_trial(lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(3, 3)}), "'a.weight'", "'b")
)
another_order = trial(WRAPPER)(_different_trial(_reordered, "'a.weight'", "'b.weight'"))
one_more_parameter = trial(WRAPPER)(
    _different_trial(
        lambda rank: nn.Sequential(*[nn.Linear(3, 3)] * 1, *[nn.Linear(3, 3)] * rank), "1.weight"
    )
)
another_buffer = trial(WRAPPER)(_different_trial(_with_buffer, "table"))
frozen_on_one_rank = trial(WRAPPER)(_different_trial(_partly_frozen, "second.weight", "frozen"))
another_bucket_size = trial(WRAPPER)(
    _different_trial(lambda rank: Mlp(), options=lambda rank: {"bucket_cap_mb": 0.001 + rank})
)
buffers_broadcast_by_one_rank = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(),
        "broadcast_buffers",
        options=lambda rank: {"broadcast_buffers": rank == 0},
    )
)
another_name_of_the_layout = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(), options=lambda rank: {"name": f"layout{rank}", "timeout": 2.0}
    )
)
another_shape_without_init_sync = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(hidden=8 + rank), "first.weight", options=lambda rank: {"init_sync": False}
    )
)


@trial(WRAPPER)
def another_memory_format(t):
    """Elements lie in another order: either refused, or averaged one by one all the same."""
    module = Cnn()
    if t.rank == 0:
        module.to(memory_format=torch.contiguous_format)
    try:
        model = t.wrap(module)
    except (ValueError, RuntimeError) as error:
        assert "strides" in str(error) or "format" in str(error), error
        assert t.gather(True) == [True] * t.world_size
        return
    t.gather(False)
    data = t.randn(4, 3, 8, 8)
    local = local_gradients(module, lambda m: m(data).pow(2).mean())
    model(data).pow(2).mean().backward()
    for parameter, mean in zip(model.parameters(), t.means(local)):
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-4, atol=1e-6)


test = trials_test(__name__)
