"""The command line of tools/simulate/simulate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Callable, Optional

from . import paper_figures, training_run
from . import profile as profiles
from .bucket_layout import FIRST_CAP_BYTES, MIB
from .collective import PLACEMENTS
from .figure import Figure, Series, align, text_table
from .line_chart import picture
from .paper_figures import MODELS, NOT_REPRODUCED, STATEMENTS
from .profile import BACKENDS, Compute, Profile, Refused
from .timeline_chart import timeline
from .training_run import Result, Setup
from .validation import parse_rate, read_rows, validate

_HELP = """\
Synchronizing gradients on paper: a discrete-event model of data-parallel training, from the moment
at which backward finishes a gradient until the step is committed. It takes seconds, needs no GPU
and no network, and answers questions such as

  how long is a step on 64 GPUs, with overlap and without?
      simulate run --model resnet50 --gpus 1-256 --overlap both
  which bucket size is best over 10 Gbit/s Ethernet?
      simulate sweep --model bert-large --gpus 32 --network 10gbit
  does the model say what the paper says?
      simulate paper --svg paper.svg
  does it say what this machine does?
      simulate validate --measured rows.json
  what does it take a microsecond to be, and who says so?
      simulate profiles paper

Exit status: 0 done; 1 'paper' or 'validate' found the model further off than stated; 2 wrong usage.
tools/simulate/README.md has the equations, the sources and the limits.
"""
_RUN = """\
Simulates training steps and prints, for each number of GPUs:

  step         mean over ranks and steps, in ms
  compute      what the step would take without any synchronization
  exposed      what synchronization adds to it
  comm         what all collectives take if nothing else goes on
  efficiency   compute / step
  rate         samples per second as a multiple of one GPU's without synchronization
  buckets      how many
  sent/node    MB that each node sends to other nodes, per synchronized step
"""
_SWEEP = """\
Simulates one step for each bucket size and prints how long it takes; * is the best one, and the
last lines say which sizes are within 2 % of it. 0 is a bucket for each tensor.
"""
_PAPER = """\
Repeats the evaluation of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(VLDB 2020): a table for each figure, and which of the paper's statements come out. gradsync's lines
are a projection, not the paper's. Exits 1 if a statement that held no longer does.
"""
_VALIDATE = """\
Compares the model with rows that the real benchmarks wrote:

  gradsync-bench allreduce --nodes 2 --ranks 2 --rate 1gbit --json rows.json
  tools/bench/step.py --json rows.json

and exits 1 if a row's error is above --bound. tools/simulate/measured/ has rows of README.md's
machine.
"""
_PROFILES = """\
Lists the machines and networks that come with the program, or all costs of one, each with its unit
and the source that it was read from.
"""
_BUCKETS = "0,1,2,5,10,25,50,100,200"
_NEAR = 1.02


class _Failed(Exception):
    """The model is further off than it may be."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.call(options)
    except Refused as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except _Failed as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever reads has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


# ---- run ----


def _run(options: argparse.Namespace) -> None:
    profile = _profile(options)
    rows = []
    results = []
    for backend in _backends(options, profile):
        for overlap in {"on": (True,), "off": (False,), "both": (True, False)}[options.overlap]:
            for ranks in options.gpus:
                setup = _setup(options, profile, backend, ranks, options.bucket_mb)
                setup = dataclasses.replace(setup, overlap=overlap)
                result = training_run.run(setup)
                results.append(result)
                rows.append(_row(setup, result))
    head = ["backend", "overlap", "GPUs", "step", "compute", "exposed", "comm"]
    head += ["efficiency", "rate", "buckets", "sent/node"]
    table = [head]
    for row in rows:
        table.append(
            [
                row["backend"],
                "on" if row["overlap"] else "off",
                str(row["gpus"]),
                *(f"{row[key]:.2f}" for key in ("step_ms", "compute_ms", "exposed_ms", "comm_ms")),
                f"{row['efficiency']:.2f}",
                f"{row['efficiency'] * row['gpus']:.1f}",
                str(row["buckets"]),
                f"{row['link_bytes'] / 1e6:.1f}",
            ]
        )
    print(_subtitle(options, profile))
    print("\n".join(align(table)))
    _write_json(options, {"profile": profile.name, "model": options.model, "rows": rows})
    if options.svg and len(options.gpus) == 1:
        title = f"{options.model}: the last step of rank 0, {rows[0]['backend']}"
        spans = results[0].spans
        _write(options.svg, timeline(title, _subtitle(options, profile), spans))
    elif options.svg:
        _write(
            options.svg,
            picture(
                f"{options.model}: step against GPUs",
                _subtitle(options, profile),
                [_run_figure(options, rows)],
            ),
        )


def _row(setup: Setup, result: Result) -> dict[str, Any]:
    return {
        "backend": setup.backend,
        "overlap": setup.overlap,
        "gpus": setup.ranks,
        "nodes": len(setup.nodes()),
        "sync_every": setup.sync_every,
        "step_ms": result.step * 1e3,
        "steps_ms": [step * 1e3 for step in result.steps],
        "compute_ms": result.compute * 1e3,
        "exposed_ms": result.exposed * 1e3,
        "comm_ms": result.communication * 1e3,
        "efficiency": result.compute / result.step,
        "buckets": len(result.buckets),
        "bucket_bytes": list(result.buckets),
        "link_bytes": result.link_bytes,
        "total_bytes": result.total_bytes,
        "reduced_bytes": result.reduced_bytes,
    }


def _run_figure(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Figure:
    lines: dict[str, list[float]] = {}
    for row in rows:
        label = row["backend"] + ("" if row["overlap"] else ", no overlap")
        lines.setdefault(label, []).append(row["step_ms"])
    return Figure(
        "run",
        f"{options.model}, {options.bucket_mb:g} MiB buckets",
        "GPUs",
        tuple(str(ranks) for ranks in options.gpus),
        "step in ms",
        tuple(Series(label, tuple(values)) for label, values in lines.items()),
    )


# ---- sweep ----


def _sweep(options: argparse.Namespace) -> None:
    profile = _profile(options)
    sizes = options.buckets
    series = []
    bests = {}
    for backend in _backends(options, profile):
        for ranks in options.gpus:
            steps = [
                training_run.run(_setup(options, profile, backend, ranks, size)).step * 1e3
                for size in sizes
            ]
            least = min(steps)
            label = f"{backend}, {ranks} GPUs"
            series.append(Series(label, tuple(steps), steps.index(least)))
            bests[label] = {
                "bucket_mb": sizes[steps.index(least)],
                "step_ms": least,
                "within_2_percent": [
                    size for size, step in zip(sizes, steps) if step <= least * _NEAR
                ],
            }
    figure = Figure(
        "sweep",
        f"{options.model}: step against bucket size",
        "MiB",
        tuple(f"{size:g}" for size in sizes),
        "step in ms",
        tuple(series),
        digits=2,
    )
    print(_subtitle(options, profile))
    print(text_table(figure))
    for label, best in bests.items():
        near = ", ".join(f"{size:g}" for size in best["within_2_percent"])
        print(
            f"best for {label}: {best['bucket_mb']:g} MiB, {best['step_ms']:.2f} ms"
            f" (within 2 %: {near})"
        )
    _write_json(options, {"figure": figure.to_json(), "best": bests})
    if options.svg:
        _write(options.svg, picture(figure.title, _subtitle(options, profile), [figure]))


# ---- paper ----


def _paper(options: argparse.Namespace) -> None:
    made = paper_figures.figures()
    for figure in made.values():
        print(text_table(figure))
        print()
    print("What the paper says, and what others measured:")
    unexpected = []
    statements = []
    for statement in STATEMENTS:
        holds, instead = statement.check(made)
        if holds == (statement.says in NOT_REPRODUCED):
            unexpected.append(statement.says)
        print(f"  {'yes' if holds else 'no '}  Fig. {statement.figure}: {statement.says}")
        print(f"         model: {instead}")
        print(f"         read in: {statement.source}")
        statements.append(
            {
                "figure": statement.figure,
                "says": statement.says,
                "source": statement.source,
                "holds": holds,
                "model": instead,
            }
        )
    figures = [figure.to_json() for figure in made.values()]
    _write_json(options, {"figures": figures, "statements": statements})
    if options.svg:
        drawn = [_shares(made["overlap"]), made["scale"]]
        for name in ("buckets-16", "buckets-32"):
            drawn.append(made[name].having(("nccl", "gradsync"), "NCCL and gradsync"))
            drawn.append(made[name].having(("gloo",), "Gloo"))
        drawn.append(dataclasses.replace(made["skip"].having(("nccl",), "NCCL"), y_from=95))
        drawn.append(made["skip"].having(("gloo",), "Gloo"))
        drawn += [made["round-robin"], made["published"]]
        _write(
            options.svg,
            picture(
                "PyTorch Distributed (VLDB 2020), on paper once more",
                "Simulated: profile 'paper', in the last panel 'dgx1'. gradsync is a projection."
                " Not every y axis begins at 0.",
                drawn,
            ),
        )
    if unexpected:
        raise _Failed("not as README.md says: " + "; ".join(unexpected))


def _shares(figure: Figure) -> Figure:
    """What overlap saves, beside the paper's numbers; the steps in ms need another scale."""
    return dataclasses.replace(
        figure,
        x=tuple(x.replace("bert-large", "BERT").replace("resnet50", "RN50") for x in figure.x),
        x_label="",
        bars=True,
        y_label="% of the step that overlap takes away",
        series=(
            dataclasses.replace(figure.line("saved %"), label="model"),
            dataclasses.replace(figure.line("paper %"), label="paper"),
        ),
    )


# ---- validate ----


def _validate(options: argparse.Namespace) -> None:
    profile = _profile(options)
    result = validate(
        read_rows(options.measured),
        profile,
        options.least,
        not options.separate_machines,
        options.ranks_are_per_node,
    )
    table = [["row", "predicted", "measured", "unit", "error %"]]
    for row in result.compared:
        table.append(
            [row.what, f"{row.predicted:.1f}", f"{row.measured:.1f}", row.unit, f"{row.error:+.1f}"]
        )
    print("\n".join(align(table)))
    for reason in result.passed_over:
        print(f"passed over: {reason}")
    print(
        f"error: median {result.median_error:.1f} %, largest {result.worst_error:.1f} %,"
        f" bound {options.bound:g} %, {len(result.compared)} rows"
    )
    _write_json(
        options,
        {
            "profile": profile.name,
            "bound_percent": options.bound,
            "median_error_percent": result.median_error,
            "worst_error_percent": result.worst_error,
            "rows": [
                {**dataclasses.asdict(row), "error_percent": row.error} for row in result.compared
            ],
            "passed_over": list(result.passed_over),
        },
    )
    if options.svg:
        _write(
            options.svg,
            picture(
                "Predicted against measured",
                f"profile {profile.name}; median error {result.median_error:.1f} %",
                [
                    Figure(
                        "validate",
                        "error of each row",
                        "row",
                        tuple(str(number) for number in range(1, len(result.compared) + 1)),
                        "absolute error in % of what was measured",
                        (
                            Series("error", tuple(abs(row.error) for row in result.compared)),
                            Series("bound", (options.bound,) * len(result.compared)),
                        ),
                    )
                ],
            ),
        )
    if result.worst_error > options.bound:
        raise _Failed(f"a row is {result.worst_error:.1f} % off, more than {options.bound:g} %")


# ---- profiles ----


def _profiles(options: argparse.Namespace) -> None:
    if options.name is None:
        for folder in (profiles.PROFILES, profiles.NETWORKS):
            print(f"{folder.name}:")
            rows = [
                [f"  {name}", profiles.load(name, folder).about] for name in profiles.names(folder)
            ]
            width = max(len(name) for name, _ in rows)
            print("\n".join(f"{name.ljust(width)}  {about}" for name, about in rows))
        return
    in_networks = options.name in profiles.names(profiles.NETWORKS)
    profile = profiles.load(options.name, profiles.NETWORKS if in_networks else profiles.PROFILES)
    print(f"{profile.name}: {profile.about}")
    for key, value in profile.values.items():
        print(f"  {key} = {value.value:g} {value.unit}\n      {value.source}")


# ---- What they have in common ----


def _profile(options: argparse.Namespace) -> Profile:
    profile = profiles.load(options.profile)
    network: Optional[str] = options.network
    if network is None:
        return profile
    rate = parse_rate(network)
    if network in profiles.names(profiles.NETWORKS) or rate is None:
        return profile.on_network(profiles.load(network, profiles.NETWORKS))
    changed = profile.with_values({"link.rate": rate, "link.efficiency": 0.9415}, "--network")
    return dataclasses.replace(changed, name=f"{profile.name} on {network}")


def _backends(options: argparse.Namespace, profile: Profile) -> Sequence[str]:
    chosen: Optional[Sequence[str]] = options.backend
    return chosen if chosen is not None else profile.backends


def _setup(
    options: argparse.Namespace, profile: Profile, backend: str, ranks: int, bucket_mb: float
) -> Setup:
    compute = None
    if options.compute_ms is not None:
        compute = Compute(options.compute_ms * 1e-3, 0.0)
    if options.slow_rank is not None and options.slow_rank[0] >= ranks:
        raise Refused(f"there is no rank {options.slow_rank[0]} among {ranks}")
    rounds = -(-options.steps // options.skip)
    return Setup(
        MODELS[options.model],
        profile,
        backend,
        ranks,
        bucket_cap=round(bucket_mb * MIB),
        first_bucket_cap=FIRST_CAP_BYTES,
        overlap=options.overlap != "off",
        sync_every=options.skip,
        lanes=options.lanes,
        steps=rounds * options.skip,
        seed=options.seed,
        compute=compute,
        ranks_of_node=options.ranks_per_node,
        placement=options.placement,
        slow_rank=options.slow_rank,
    )


def _subtitle(options: argparse.Namespace, profile: Profile) -> str:
    parts = [f"profile {profile.name}", f"{options.model}"]
    if options.skip > 1:
        parts.append(f"synchronized every {options.skip} steps")
    if options.lanes > 1:
        parts.append(f"{options.lanes} lanes")
    if options.slow_rank is not None:
        parts.append(f"rank {options.slow_rank[0]} {options.slow_rank[1]:g} times as slow")
    return ", ".join(parts)


def _write_json(options: argparse.Namespace, content: Any) -> None:
    if options.json:
        _write(options.json, json.dumps(content, indent=2) + "\n")


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error}") from error
    print(f"written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simulate",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, summary: str, text: str, call: Callable[[argparse.Namespace], None]
    ) -> Any:
        made = commands.add_parser(
            name,
            description=text,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.set_defaults(call=call)
        return made

    run = command("run", "steps for numbers of GPUs", _RUN, _run)
    _add_training(run, "1-256", "both", "on")
    run.add_argument(
        "--bucket-mb", type=_size, default=25.0, metavar="N", help="MiB, default 25; 0: per tensor"
    )
    sweep = command("sweep", "bucket sizes, and the best one", _SWEEP, _sweep)
    _add_training(sweep, "16,32", "on or off", "on")
    sweep.add_argument(
        "--buckets", type=_sizes, default=_sizes(_BUCKETS), metavar="LIST", help=f"MiB, {_BUCKETS}"
    )
    paper = command("paper", "the paper's figures and statements", _PAPER, _paper)
    check = command("validate", "predicted against measured", _VALIDATE, _validate)
    check.add_argument("--measured", type=pathlib.Path, required=True, metavar="FILE", help="rows")
    check.add_argument(
        "--bound", type=_positive, default=25.0, metavar="PERCENT", help="of any row, default 25"
    )
    check.add_argument(
        "--least", type=_whole, default=0, metavar="BYTES", help="pass over smaller all-reduces"
    )
    check.add_argument(
        "--separate-machines",
        action="store_true",
        help="nodes do not share one machine's memory (default: they are its namespaces)",
    )
    check.add_argument(
        "--ranks-are-per-node",
        action="store_true",
        help="the rows' ranks are those of one node (default: of all nodes together)",
    )
    _add_machine(check, "this-machine")
    for each in (run, sweep, paper, check):
        each.add_argument("--json", type=pathlib.Path, metavar="FILE", help="the same as JSON")
        each.add_argument("--svg", type=pathlib.Path, metavar="FILE", help="a picture")
    listing = command("profiles", "costs and their sources", _PROFILES, _profiles)
    listing.add_argument("name", nargs="?", help="whose costs and sources to print")
    return parser


def _add_machine(parser: argparse.ArgumentParser, profile: str) -> None:
    parser.add_argument(
        "--profile",
        default=profile,
        metavar="NAME",
        help=f"a machine of 'simulate profiles', or a file; default {profile}",
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="of 'simulate profiles', a file, or a rate like 40gbit; default: as in the profile",
    )


def _add_training(parser: argparse.ArgumentParser, gpus: str, overlaps: str, overlap: str) -> None:
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="resnet50", help="default resnet50"
    )
    parser.add_argument(
        "--gpus",
        type=_gpus,
        default=_gpus(gpus),
        metavar="LIST",
        help=f"ranks: 8 or 8,16, or 1-256 for the powers of two in it; default {gpus}",
    )
    parser.add_argument(
        "--backend",
        type=_chosen,
        metavar="LIST",
        help="of gradsync, nccl, gloo; default: all that the profile knows",
    )
    _add_machine(parser, "paper")
    choices = ("on", "off", "both") if "both" in overlaps else ("on", "off")
    parser.add_argument("--overlap", choices=choices, default=overlap, help="default on")
    parser.add_argument(
        "--skip", type=_count, default=1, metavar="N", help="synchronize every N-th step, default 1"
    )
    parser.add_argument(
        "--lanes", type=_count, default=1, metavar="N", help="collectives at once, default 1"
    )
    parser.add_argument("--steps", type=_count, default=4, metavar="N", help="at least, default 4")
    parser.add_argument("--seed", type=_whole, default=1, metavar="N", help="of the jitter")
    parser.add_argument(
        "--compute-ms", type=_positive, metavar="MS", help="of a step alone; default: the profile's"
    )
    parser.add_argument("--ranks-per-node", type=_count, metavar="N", help="default: the profile's")
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="block",
        help="the order in which a ring visits the ranks: node by node (default), or alternating",
    )
    parser.add_argument(
        "--slow-rank",
        type=_slow_rank,
        metavar="RANK:FACTOR",
        help="that rank computes FACTOR times as long",
    )


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number")
    return int(text)


def _count(text: str) -> int:
    number = _whole(text)
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError(f"'{text}' is not from 1 to 4096")
    return number


def _positive(text: str) -> float:
    number = _size(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not above 0")
    return number


def _size(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 0")
    return float(text)


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(sorted({_size(part) for part in text.split(",")}))


def _gpus(text: str) -> tuple[int, ...]:
    first, dash, last = text.partition("-")
    if dash:
        low, high = _count(first), _count(last)
        powers = tuple(1 << bit for bit in range(13) if low <= 1 << bit <= high)
        if not powers:
            raise argparse.ArgumentTypeError(f"no power of two lies in {text}")
        return powers
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _chosen(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(BACKENDS):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of {','.join(BACKENDS)}")
    return tuple(names)


def _slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    return _whole(rank), _positive(factor)
