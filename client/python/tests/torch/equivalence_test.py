"""After ten steps, parameters are the same as with PyTorch's DistributedDataParallel on Gloo.

Each trial trains a lesson (models.py) by a recipe, several times from the same start and on the
same data: with PyTorch's wrapper, with gradsync's (or PyTorch's with gradsync's hook), and without
a wrapper. The last is the control: the tolerance means something only if training without
synchronization exceeds it by far.
"""

import contextlib
import dataclasses

import torch
from models import LESSONS, SMALL_BUCKETS
from trial import HOOK, PYTORCH, WRAPPER, trial
from trial_ranks import trials_test

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a lesson is trained, and the tolerance of its result."""

    name: str
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    divisor: str = ""  # of uneven inputs
    faster: float = 1  # factor of the learning rate
    rtol: float = 1e-5
    atol: float = 1e-5


RECIPES = [
    Recipe("plain"),
    Recipe("accumulation", micro_batches=3),
    Recipe("uneven-by-world", divisor="world"),
    Recipe("uneven-by-live-ranks", divisor="live_ranks"),
    # 8 bits of mantissa. gradsync adds in float32 and rounds once; see float32_sums.
    Recipe("bfloat16", dtype=torch.bfloat16, faster=4, rtol=2**-6, atol=2**-8),
]


def steps_of(recipe, t):
    """Uneven inputs: rank 0 has the fewest batches."""
    return STEPS - 3 * (t.world_size - 1 - t.rank) if recipe.divisor else STEPS


def train(t, lesson, recipe, wrap, joining):
    """Returns the trained parameters and buffers.

    Args:
      wrap: wraps a module with the lesson's options.
      joining: the context for uneven inputs of the wrapped modules.
    """
    torch.manual_seed(17 if wrap is bare else 17 + t.rank)  # wrappers start from rank 0's
    modules = lesson.build()
    for module in modules.values():
        module.to(recipe.dtype)
    wrapped = {name: wrap(module, **lesson.options) for name, module in modules.items()}
    rate = lesson.learning_rate * recipe.faster
    optimizers = {name: lesson.optimizer(module, rate) for name, module in wrapped.items()}
    with joining(list(wrapped.values())) if recipe.divisor else contextlib.nullcontext():
        for step in range(steps_of(recipe, t)):
            batches = [
                tuple(
                    part.detach().to(recipe.dtype).requires_grad_(part.requires_grad)
                    if isinstance(part, torch.Tensor) and part.is_floating_point()
                    else part
                    for part in lesson.batch(t.rng(100 * step + micro), t.rank, step)
                )
                for micro in range(recipe.micro_batches)
            ]
            lesson.step(wrapped, optimizers, batches)
    return {
        f"{name}.{key}": value.clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def bare(module, **_):
    return module


def not_joining(_):
    return contextlib.nullcontext()


def pytorch_joining(recipe):
    from torch.distributed.algorithms.join import Join

    by_world = recipe.divisor == "world"
    return lambda models: Join(models, divide_by_initial_world_size=by_world)


def gradsync_joining(recipe):
    import gradsync.torch

    by_world = recipe.divisor == "world"
    return lambda models: gradsync.torch.join(models, divide_by_initial_world_size=by_world)


def float32_sums(t):
    """PyTorch's wrapper as if Gloo added 16-bit numbers in float32; Gloo rounds each sum."""

    def average(_, bucket):
        buffer = bucket.buffer()
        wide = buffer.float()
        torch.distributed.all_reduce(wide)
        future = torch.futures.Future()
        future.set_result((wide / t.world_size).to(buffer.dtype))
        return future

    def wrap(module, **options):
        model = t.pytorch(module, **options)
        model.register_comm_hook(None, average)
        return model

    return wrap


def is_buffer(key):
    return "running" in key or "tracked" in key


def comparable(lesson, recipe):
    """PyTorch's Join mixes up the operations of a GAN's modules, and Gloo ends the process."""
    return not (lesson.name == "gan" and recipe.divisor)


def exceeded(actual, expected, recipe):
    """The worst element's error, as a multiple of its tolerance."""
    worst = 0.0
    for key in actual:
        value = expected[key]
        if value.is_floating_point() and value.numel():
            difference = (actual[key].double() - value.double()).abs()
            allowed = recipe.atol + recipe.rtol * value.double().abs()
            worst = max(worst, float((difference / allowed).max()))
        else:
            assert torch.equal(actual[key], value), key
    return worst


# {(lesson, recipe): parameters and buffers of rank 0}: a rank trains by PyTorch's wrapper once.
_pytorch_results = {}


def pytorch_result(t, lesson, recipe):
    """What PyTorch's wrapper ends with, once all ranks agree on it."""
    key = lesson.name, recipe.name
    if key not in _pytorch_results:
        reference = float32_sums(t) if recipe.dtype is torch.bfloat16 else t.pytorch
        result = train(t, lesson, recipe, reference, pytorch_joining(recipe))
        trained = [result[name] for name in result if not is_buffer(name)]
        t.same_bits(trained, "PyTorch's results")
        # PyTorch's wrapper broadcasts rank 0's buffers before a forward pass, ours after a step.
        _pytorch_results[key] = t.gather(result)[0]
    return _pytorch_results[key]


def _trial(lesson, recipe):
    def equivalent(t):
        if t.ours:
            session = t.session(divisor=recipe.divisor or "live_ranks")
            actual = train(
                t,
                lesson,
                recipe,
                lambda module, **options: t.wrap(
                    module, session=session, **SMALL_BUCKETS, **options
                ),
                gradsync_joining(recipe),
            )
        elif t.wrapper == HOOK:
            session = t.session(divisor=recipe.divisor or "live_ranks")
            actual = train(
                t,
                lesson,
                recipe,
                lambda module, **options: t.wrap(
                    module, session=session, **SMALL_BUCKETS, **options
                ),
                pytorch_joining(recipe),
            )
        if not comparable(lesson, recipe):
            t.same_bits(actual.values(), "results")
            return
        expected = pytorch_result(t, lesson, recipe)
        if t.wrapper == PYTORCH:
            # The control: see the top.
            torch.manual_seed(17)
            start = {
                f"{name}.{key}": value.to(recipe.dtype) if value.is_floating_point() else value
                for name, module in lesson.build().items()
                for key, value in module.state_dict().items()
            }
            floating = {k: v for k, v in expected.items() if v.is_floating_point()}
            learnt = exceeded({k: start[k] for k in floating}, floating, recipe)
            assert learnt > 10, f"nothing was learnt: {learnt} tolerances"
            alone = train(t, lesson, recipe, bare, not_joining)
            control = exceeded({k: alone[k] for k in floating}, floating, recipe)
            assert max(t.gather(control)) > 10, f"unsynchronized: only {control} tolerances away"
            return
        if t.wrapper == HOOK or recipe.divisor:
            # With the hook, PyTorch synchronizes buffers. With uneven inputs PyTorch takes the
            # highest live rank's, gradsync the lowest's.
            actual = {key: value for key, value in actual.items() if not is_buffer(key)}
        t.same_bits(actual.values(), "results")
        worst = exceeded(actual, expected, recipe)
        assert worst <= 1, f"{worst} tolerances away from PyTorch's result"

    return equivalent


# Every lesson by every recipe, with 2 and 3 ranks.
for _lesson in LESSONS:
    for _recipe in RECIPES:
        _name = f"{_lesson.name}-{_recipe.name}".replace("-", "_")
        _theirs = (HOOK, PYTORCH) if comparable(_lesson, _recipe) else ()
        if _recipe.divisor == "live_ranks":
            # PyTorch's Join also calls the hook on ranks that have finished: all ranks are live.
            _theirs = tuple(w for w in _theirs if w != HOOK)
        globals()[f"{_name}_2"] = trial(WRAPPER, *_theirs)(_trial(_lesson, _recipe))
        globals()[f"{_name}_3"] = trial(WRAPPER, *_theirs, world_size=3)(_trial(_lesson, _recipe))
del _lesson, _recipe, _name, _theirs

test = trials_test(__name__)
