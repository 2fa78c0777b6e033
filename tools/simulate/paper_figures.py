"""The paper's figures, and whether each of its statements holds in them.

The paper itself was not at hand: each statement names the source that quotes it, and the pictures
are not compared. A statement's check looks at the figures' numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from . import profile as profiles
from .bert import bert
from .bucket_layout import MIB, NEAR
from .figure import Figure, Series
from .profile import Profile
from .resnet50 import resnet50
from .training_run import Result, Setup, run

MODELS = {model.name: model for model in (resnet50(), bert("base"), bert("large"))}

_PAPER_MODELS = ("resnet50", "bert-large")
_LIBRARIES = ("nccl", "gloo")
_ALL = ("nccl", "gloo", "gradsync")
_BUCKETS = (0, 1, 2, 5, 10, 25, 50, 100, 200)
_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SKIPS = (1, 2, 4, 8)
_LANES = (1, 3, 5)

# Section 5.1: how much of a step overlap saves, in per cent.
PAPER_SAVED = {
    ("resnet50", "nccl"): 38.0,
    ("bert-large", "nccl"): 35.2,
    ("resnet50", "gloo"): 26.8,
    ("bert-large", "gloo"): 21.5,
}


# The pieces of a check's evidence: whether each holds, and the model's numbers as text.
_Evidence = Iterator[tuple[bool, str]]


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of the paper.

    Attributes:
      figure: where the paper shows it.
      says: the statement.
      source: where it was read.
      check: yields its evidence. The statement holds if every piece does.
    """

    figure: str
    says: str
    source: str
    check: Callable[[Mapping[str, Figure]], _Evidence]

    def judge(self, made: Mapping[str, Figure]) -> tuple[bool, str]:
        """Whether it holds in figures(), and the model's numbers."""
        evidence = list(self.check(made))
        return all(holds for holds, _ in evidence), "; ".join(text for _, text in evidence)


def figures() -> dict[str, Figure]:
    """All figures by name; takes some seconds."""
    paper = profiles.load("paper")
    made = [
        _overlap(paper),
        *(_buckets(paper, ranks) for ranks in (16, 32)),
        _scale(paper),
        _skip(paper),
        _round_robin(paper),
    ]
    return {figure.name: figure for figure in made}


def _run(profile: Profile, model: str, backend: str, ranks: int, **more: Any) -> Result:
    return run(Setup(MODELS[model], profile, backend, ranks, **more))


def _overlap(paper: Profile) -> Figure:
    cases = [(model, backend) for backend in _ALL for model in _PAPER_MODELS]
    with_ = [_run(paper, *case, 32).step for case in cases]
    without = [_run(paper, *case, 32, overlap=False).step for case in cases]
    pairs = list(zip(with_, without))
    return Figure(
        "overlap",
        "Fig. 6: what overlap saves, 32 GPUs",
        "case",
        tuple(f"{model}, {backend}" for model, backend in cases),
        "step in ms; saved and paper in % of the step without overlap",
        (
            Series("overlap", tuple(step * 1e3 for step in with_)),
            Series("no overlap", tuple(step * 1e3 for step in without)),
            Series("saved %", tuple((1 - one / other) * 100 for one, other in pairs)),
            Series("paper %", tuple(PAPER_SAVED.get(case) for case in cases)),
            Series("more steps/s %", tuple((other / one - 1) * 100 for one, other in pairs)),
        ),
        (
            "The paper's 'speedup' is read as the share of the step that overlap takes away; as a",
            "ratio of rates it would be the last column. gradsync's lines are a projection.",
        ),
    )


def _buckets(paper: Profile, ranks: int) -> Figure:
    series = []
    for model in _PAPER_MODELS:
        for backend in _ALL:
            steps = [
                _run(paper, model, backend, ranks, bucket_cap=size * MIB, steps=2).step
                for size in _BUCKETS
            ]
            best = min(steps)
            series.append(
                Series(f"{model}, {backend}", tuple(s / best for s in steps), steps.index(best))
            )
    return Figure(
        f"buckets-{ranks}",
        f"Fig. {7 if ranks == 16 else 8}: bucket size, {ranks} GPUs",
        "bucket size in MiB (0: a bucket for each tensor)",
        tuple(str(size) for size in _BUCKETS),
        "step as a multiple of the best one's",
        tuple(series),
        ("* the best",),
        3,
    )


def _scale(paper: Profile) -> Figure:
    series = []
    for model in _PAPER_MODELS:
        for backend in _ALL:
            steps = [_run(paper, model, backend, ranks, steps=2).step for ranks in _GPUS]
            series.append(Series(f"{model}, {backend}", tuple(s / steps[0] for s in steps)))
    return Figure(
        "scale",
        "Fig. 9: scaling, 25 MiB buckets",
        "GPUs",
        tuple(str(ranks) for ranks in _GPUS),
        "step as a multiple of one GPU's",
        tuple(series),
        digits=2,
    )


def _skip(paper: Profile) -> Figure:
    gpus = _GPUS[3:]
    series = []
    for backend in _LIBRARIES:
        for skip in _SKIPS:
            steps = [
                _run(paper, "resnet50", backend, ranks, sync_every=skip, steps=8).step * 1e3
                for ranks in gpus
            ]
            series.append(Series(f"{backend}, every {skip}", tuple(steps)))
    return Figure(
        "skip",
        "Fig. 10: synchronizing every n-th step, ResNet50",
        "GPUs",
        tuple(str(ranks) for ranks in gpus),
        "mean step in ms",
        tuple(series),
    )


def _round_robin(paper: Profile) -> Figure:
    series = []
    for model in _PAPER_MODELS:
        for backend in _LIBRARIES:
            steps = [_run(paper, model, backend, 32, lanes=lanes).step for lanes in _LANES]
            series.append(Series(f"{model}, {backend}", tuple(s / steps[0] for s in steps)))
    return Figure(
        "round-robin",
        "Fig. 12: round-robin process groups, 32 GPUs",
        "groups",
        tuple(str(lanes) for lanes in _LANES),
        "step as a multiple of one group's",
        tuple(series),
        ("Groups hide each other's latency; they do not make a link faster.",),
        3,
    )


# ---- What the paper says ----

_QUOTED = "section 5.1, word by word in a public book, whose author checked it with ar5iv"
_INTRODUCTION = "section 1, contributions, word by word in public reading notes"
_LESSONS = "section 6.1, as summarized in ruipeterpan/paper_notes"
_SLIDES = "section 5, as summarized in course slides (NYU Courant, Lee and Kim, 2024)"
_ABSTRACT = "abstract, arXiv:2006.15704"


def _saved_within(model: str, backend: str, points: float) -> Statement:
    paper = PAPER_SAVED[model, backend]

    def check(made: Mapping[str, Figure]) -> _Evidence:
        saved = made["overlap"].value("saved %", f"{model}, {backend}")
        yield abs(saved - paper) <= points, f"{saved:.1f} %, {saved - paper:+.1f} points"

    return Statement(
        "6",
        f"overlap gains {paper} % for {model} on {backend} (here within {points:g} points)",
        _QUOTED,
        check,
    )


def _gloo_gains_less(made: Mapping[str, Figure]) -> _Evidence:
    for model in _PAPER_MODELS:
        nccl, gloo = (made["overlap"].value("saved %", f"{model}, {on}") for on in _LIBRARIES)
        yield gloo < nccl, f"{model}: Gloo {gloo:.1f} %, NCCL {nccl:.1f} %"


def _bert_gains_less(made: Mapping[str, Figure]) -> _Evidence:
    for backend in _LIBRARIES:
        small = made["overlap"].value("saved %", f"resnet50, {backend}")
        large = made["overlap"].value("saved %", f"bert-large, {backend}")
        yield large < small, f"{backend}: BERT {large:.1f} %, ResNet50 {small:.1f} %"


def _middle_is_best(made: Mapping[str, Figure]) -> _Evidence:
    for name in ("buckets-16", "buckets-32"):
        for series in made[name].series:
            if "gradsync" in series.label:
                continue
            assert series.marked is not None
            best = f"{name[8:]} GPUs, {series.label}: {made[name].x[series.marked]} MiB"
            yield 0 < series.marked < len(_BUCKETS) - 1, best


def _ten_to_twenty_five(made: Mapping[str, Figure]) -> _Evidence:
    for name in ("buckets-16", "buckets-32"):
        values = [made[name].value("resnet50, nccl", x) for x in ("10", "25")]
        text = f"{name[8:]} GPUs: 10 MiB {values[0]:.3f}, 25 MiB {values[1]:.3f} of the best"
        yield min(values) <= NEAR, text


def _twice_as_fast(made: Mapping[str, Figure]) -> _Evidence:
    worst = made["buckets-32"].value("resnet50, gloo", "0")
    yield worst > 2, f"ResNet50 on Gloo, 32 GPUs: {worst:.1f} times as fast as without buckets"


def _larger_model_larger_bucket(made: Mapping[str, Figure]) -> _Evidence:
    figure = made["buckets-32"]
    growth = MODELS["bert-large"].elements / MODELS["resnet50"].elements
    for backend in _LIBRARIES:
        sizes = []
        for model in _PAPER_MODELS:
            marked = figure.line(f"{model}, {backend}").marked
            assert marked is not None
            sizes.append(float(figure.x[marked]))
        text = f"{backend}: {sizes[0]:g} to {sizes[1]:g} MiB for {growth:.0f} times the size"
        yield sizes[0] < sizes[1] < sizes[0] * growth, text


def _grows_with_gpus(made: Mapping[str, Figure]) -> _Evidence:
    for series in made["scale"].series:
        if "gradsync" in series.label:
            continue
        values = [value for value in series.values if value is not None]
        # A tenth of a per cent is the luck of the jitter.
        grows = all(later > earlier * 0.999 for earlier, later in zip(values, values[1:]))
        yield grows, f"{series.label}: {values[-1]:.2f} at 256"


def _near_linear(made: Mapping[str, Figure]) -> _Evidence:
    step = made["scale"].value("resnet50, nccl", "256")
    yield step < 1.25, f"ResNet50 on NCCL: 256 GPUs do the work of {256 / step:.0f}"


def _nccl_is_faster(made: Mapping[str, Figure]) -> _Evidence:
    ratios = [
        made["scale"].value(f"{model}, gloo", x) / made["scale"].value(f"{model}, nccl", x)
        for model in _PAPER_MODELS
        for x in ("16", "32", "64", "128", "256")
    ]
    yield min(ratios) > 1.2, f"from 16 GPUs {min(ratios):.1f} to {max(ratios):.1f} times as fast"


def _same_machine(made: Mapping[str, Figure]) -> _Evidence:
    one, two = (made["scale"].value("bert-large, nccl", x) for x in ("8", "16"))
    yield two > one * 1.1, f"BERT on NCCL: {one:.2f} on one server, {two:.2f} on two"


def _skipping_helps(made: Mapping[str, Figure]) -> _Evidence:
    for backend in _LIBRARIES:
        shorter = True
        for x in made["skip"].x:
            steps = [made["skip"].value(f"{backend}, every {skip}", x) for skip in _SKIPS]
            shorter &= all(later < earlier for earlier, later in zip(steps, steps[1:]))
        yield shorter, f"{backend}, 256 GPUs: {steps[0]:.0f} to {steps[-1]:.0f} ms"


def _groups_help(made: Mapping[str, Figure]) -> _Evidence:
    for backend, most in (("gloo", 0.97), ("nccl", 0.995)):
        value = made["round-robin"].value(f"bert-large, {backend}", "3")
        yield value < most, f"bert-large, {backend} {value:.3f}"


def _communication_grows(made: Mapping[str, Figure]) -> _Evidence:
    for backend in _LIBRARIES:
        small = made["scale"].value(f"resnet50, {backend}", "32")
        large = made["scale"].value(f"bert-large, {backend}", "32")
        text = f"{backend}, 32 GPUs: {small:.2f} and {large:.2f} of one GPU's step"
        yield large > small, text


STATEMENTS = (
    _saved_within("resnet50", "nccl", 3),
    _saved_within("bert-large", "nccl", 4),
    _saved_within("resnet50", "gloo", 3),
    _saved_within("bert-large", "gloo", 4),
    Statement(
        "6", "with Gloo overlap gains less: communication dominates", _QUOTED, _gloo_gains_less
    ),
    Statement("6", "overlap gains less for BERT than for ResNet", _QUOTED, _bert_gains_less),
    Statement(
        "6",
        "communication weighs more, the larger the model",
        _INTRODUCTION,
        _communication_grows,
    ),
    Statement("7, 8", "the best bucket lies between the extremes", _LESSONS, _middle_is_best),
    Statement(
        "7, 8",
        "10 to 25 MB are best for ResNet50 on NCCL (here: one of them within 2 % of the best)",
        _SLIDES,
        _ten_to_twenty_five,
    ),
    Statement(
        "7, 8",
        "the right bucket size can make a step more than 2 times as fast",
        _INTRODUCTION,
        _twice_as_fast,
    ),
    Statement(
        "7, 8",
        "the best bucket grows with the model, but less than it",
        _LESSONS,
        _larger_model_larger_bucket,
    ),
    Statement("9", "the step takes longer with every doubling", _SLIDES, _grows_with_gpus),
    Statement("9", "near-linear scalability on 256 GPUs", _ABSTRACT, _near_linear),
    Statement("9", "NCCL is considerably faster than Gloo", _LESSONS, _nccl_is_faster),
    Statement("9", "leaving one machine costs a lot", _LESSONS, _same_machine),
    Statement(
        "10", "skipping synchronization shortens the mean step", _INTRODUCTION, _skipping_helps
    ),
    Statement("12", "3 to 5 process groups help a large model", _INTRODUCTION, _groups_help),
)
