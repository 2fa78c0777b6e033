"""The command line of tools/simulate/simulate."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence

from . import paper_figures
from . import profile as profiles
from .bucket_layout import MIB, NEAR
from .figure import Figure, Series, text_table
from .paper_figures import MODELS, STATEMENTS
from .profile import BACKENDS, Compute, Profile, Refused
from .training_run import Setup, run

_HELP = """\
Simulates how a data-parallel training job synchronizes gradients, from the moment at which backward
finishes a gradient until the step is committed. A run takes seconds and needs no GPU.

  simulate sweep --model bert-large --gpus 32 --network 10gbit   recommends a bucket size
  simulate paper                                                 reproduces the paper's figures

Exit status: 0 success; 1 'paper' does not reproduce a statement; 2 wrong usage.
tools/simulate/README.md has the equations, the sources and the limits.
"""
_SWEEP = """\
Simulates a step for each bucket size and prints how long it takes. * marks the best size; the last
lines list every size within 2 % of it. Size 0 is one bucket for each tensor.
"""
_PAPER = """\
Repeats the evaluation of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(VLDB 2020): a table for each figure, and whether each statement of the paper holds. gradsync's
columns are a projection; the paper has none. Exits 1 if a statement does not hold.
"""
_BUCKETS = "0,1,2,5,10,25,50,100,200"
# Ethernet with an MTU of 1500: 1448 bytes of TCP payload in 1538 on the wire.
_ETHERNET_EFFICIENCY = 0.9415
_STEPS = 4


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.call(options)
    except Refused as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return status


def _sweep(options: argparse.Namespace) -> int:
    profile = _profile(options)
    compute = Compute(options.compute_ms * 1e-3, 0.0) if options.compute_ms else None
    columns = []
    recommended = []
    for backend in options.backend or profile.backends:
        for ranks in options.gpus:
            setup = Setup(
                MODELS[options.model],
                profile,
                backend,
                ranks,
                steps=_STEPS,
                compute=compute,
                ranks_of_node=options.ranks_per_node,
            )
            steps = [
                run(dataclasses.replace(setup, bucket_cap=round(size * MIB))).step * 1e3
                for size in options.buckets
            ]
            best = steps.index(min(steps))
            near = [
                f"{size:g}"
                for size, step in zip(options.buckets, steps)
                if step <= steps[best] * NEAR
            ]
            columns.append(Series(f"{backend}, {ranks} GPUs", tuple(steps), best))
            recommended.append(
                f"best for {backend}, {ranks} GPUs: {options.buckets[best]:g} MiB,"
                f" {steps[best]:.2f} ms (within 2 %: {', '.join(near)})"
            )
    figure = Figure(
        "sweep",
        f"{options.model}, profile {profile.name}: step against bucket size",
        "MiB",
        tuple(f"{size:g}" for size in options.buckets),
        "step in ms",
        tuple(columns),
        digits=2,
    )
    print(text_table(figure))
    print("\n".join(recommended))
    return 0


def _paper(_: argparse.Namespace) -> int:
    made = paper_figures.figures()
    for figure in made.values():
        print(text_table(figure))
        print()
    print("What the paper says:")
    missing = []
    for statement in STATEMENTS:
        holds, evidence = statement.judge(made)
        if not holds:
            missing.append(statement.says)
        print(f"  {'yes' if holds else 'no '}  Fig. {statement.figure}: {statement.says}")
        print(f"         model: {evidence}")
        print(f"         read in: {statement.source}")
    if missing:
        print("simulate: not reproduced: " + "; ".join(missing), file=sys.stderr)
        return 1
    return 0


def _profile(options: argparse.Namespace) -> Profile:
    profile = profiles.load(options.profile)
    if options.network is None:
        return profile
    changes = {"link.rate": options.network, "link.efficiency": _ETHERNET_EFFICIENCY}
    name = f"{profile.name} at {options.network:g} Gbit/s"
    return dataclasses.replace(profile.with_values(changes, "--network"), name=name)


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="simulate", description=_HELP, formatter_class=layout, allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    sweep = commands.add_parser(
        "sweep",
        description=_SWEEP,
        help="recommends a bucket size",
        formatter_class=layout,
        allow_abbrev=False,
    )
    sweep.set_defaults(call=_sweep)
    sweep.add_argument(
        "--model", choices=sorted(MODELS), default="resnet50", help="default resnet50"
    )
    sweep.add_argument(
        "--gpus", type=_counts, default=(16, 32), metavar="LIST", help="ranks, default 16,32"
    )
    sweep.add_argument(
        "--buckets", type=_sizes, default=_sizes(_BUCKETS), metavar="LIST", help=f"MiB, {_BUCKETS}"
    )
    sweep.add_argument(
        "--backend",
        type=_backends,
        metavar="LIST",
        help=f"some of {','.join(BACKENDS)}; default: all that the profile has",
    )
    sweep.add_argument(
        "--profile",
        default="paper",
        metavar="NAME",
        help=f"the machine: {', '.join(profiles.names())}, or a file; default paper",
    )
    sweep.add_argument(
        "--network",
        type=_rate,
        metavar="RATE",
        help="Ethernet between nodes, such as 10gbit; default: the profile's",
    )
    sweep.add_argument(
        "--compute-ms",
        type=_positive,
        metavar="MS",
        help="a step without synchronization; default: the profile's",
    )
    sweep.add_argument("--ranks-per-node", type=_count, metavar="N", help="default: the profile's")
    paper = commands.add_parser(
        "paper",
        description=_PAPER,
        help="reproduces the paper's figures and statements",
        formatter_class=layout,
        allow_abbrev=False,
    )
    paper.set_defaults(call=_paper)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"'{text}' is not from 1 to 4096")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _size(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 0")
    return float(text)


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(sorted({_size(part) for part in text.split(",")}))


def _positive(text: str) -> float:
    number = _size(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not above 0")
    return number


def _rate(text: str) -> float:
    """ "250mbit" in Gbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no rate like 10gbit")
    return float(match[1]) * (1.0 if match[2].lower() == "g" else 1e-3)


def _backends(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(BACKENDS):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of {','.join(BACKENDS)}")
    return tuple(names)
