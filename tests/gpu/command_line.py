"""gpu_check's command line."""

import argparse
import os
import pathlib
import shutil
import signal
import sys
import tarfile
import tempfile

from run import Run

HELP = """\
Runs the bundle of tools/gpu_bundle on this machine: tests of the product against the real driver
and NCCL, experiments on what the code assumes of GPUs, and benchmarks. Each part has a time limit,
and --limit bounds all parts together. After each part it writes the report again, as JSON and
Markdown, and logs.tar.gz with every log: a run that is killed leaves those of its finished parts.
tests/gpu/README.md says what each part decides.

Needs a GPU with its driver. Looks for NCCL in PyTorch's wheels (of the python3 in PATH), then where
the loader finds libnccl.so.2. If nvidia-cuda-mps-control exists, starts and ends MPS for its
experiments, in a folder of its own. Needs no network and installs nothing.

exit status: 0 every part that could run is as expected; 1 a part is not, as the report says;
2 wrong usage, or no GPU. Fakes have no speed: with --fakes, what is about speed is not applicable
"""


def parse(arguments):
    # The folder of the modules, in the bundle or in the tree.
    here = pathlib.Path(__file__).resolve().parent
    bundle = here.parent if (here.parent / "bundle.json").exists() else None
    reports = pathlib.Path(os.environ.get("OUT") or ("reports" if bundle else here / "reports"))
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bundle",
        type=pathlib.Path,
        default=bundle,
        help="the archive of gpu_bundle, or the folder that it was unpacked to; "
        "default: where this script lies",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=reports,
        help=f"the reports' folder; default $OUT, else {reports}",
    )
    parser.add_argument("--limit", type=float, default=470, help="of all parts, in s; default 470")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="PART,...",
        help="tests, experiments, benches, python, or parts by name",
    )
    parser.add_argument(
        "--fakes",
        action="store_true",
        help="on fake GPUs, of a bundle that has them: tries the run itself, measures nothing",
    )
    parser.add_argument("--fake-gpus", type=int, default=1, help="how many of them")
    options = parser.parse_args(arguments)
    if options.bundle is None or not options.bundle.exists():
        parser.error("no bundle: make one with tools/gpu_bundle, and give --bundle FILE")
    return options


def main(arguments):
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # MPS is ended too
    options.out = options.out.resolve()
    # The tests' sockets lie below it, and a socket's path must be short.
    work = pathlib.Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/tmp"))
    try:
        bundle = options.bundle.resolve()
        if not bundle.is_dir():
            with tarfile.open(bundle) as archive:
                archive.extractall(work)
            bundle = work / "gradsync-gpu"
        if options.fakes and not (bundle / "fakes").is_dir():
            print("gpu_check: the bundle has no fakes; make it with --fakes", file=sys.stderr)
            return 2
        run = Run(options, bundle, work)
        if not run.machine["gpus"]:
            error = run.machine.get("error", "the driver shows none")
            print(f"gpu_check: no GPU: {error}", file=sys.stderr)
            return 2
        run.run()
        for verdict in ("not available", "not applicable"):
            for name in run.report.named(verdict):
                print(f"{verdict}: {name}")
        unexpected = run.report.unexpected()
        for name in unexpected:
            print(f"NOT AS EXPECTED: {name}")
        print(run.report.path(".md"))
        return 1 if unexpected else 0
    finally:
        shutil.rmtree(work, ignore_errors=True)
