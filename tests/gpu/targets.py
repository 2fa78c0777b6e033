"""Compares measured figures with their targets."""

MIB = 1 << 20
# The least share of the copies' bandwidth that averaging reaches.
COPY_SHARE = 0.8
# The most microseconds that the hand-off adds to an enqueue.
ADDED_US = 30


def judge(benches, copied_bytes, fakes):
    """Rows of the report.

    `copied_bytes`: the size of a trainer's buffer to judge. `fakes`: of fakes, which have no speed.
    """
    kernels, added, waits = judge_kernels(benches, copied_bytes), *judge_handoff(benches)
    for row in (kernels, added):
        if fakes and row["value"] is not None:
            row["verdict"] = "not applicable"
    return [kernels, added, waits]


def figures(benches, name):
    for bench in benches:
        if bench["name"] == name and bench["verdict"] == "measured":
            return bench["figures"]
    return None


def judge_kernels(benches, size):
    text = f"averaging 2 x {size // 1024} KiB, of the copy bandwidth"
    for row in figures(benches, "two trainers on a GPU") or []:
        if row["impl"] == "kernels" and row["bytes"] == size:
            share = row["roofline_ratio_p50"]
            return target(text, f">= {COPY_SHARE}", round(share, 3), share >= COPY_SHARE)
    return target(text, f">= {COPY_SHARE}", None, None)


def judge_handoff(benches):
    measured = figures(benches, "hand-off")
    added = waits = None
    if measured:
        added = round(max(row["added_us_p50"] for row in measured["buckets"]), 1)
        waits = sum(row["host_synchronizations"] for row in measured["buckets"])
    return [
        target(
            "the hand-off's addition to an enqueue, us (p50, largest of all sizes)",
            f"<= {ADDED_US}",
            added,
            None if added is None else added <= ADDED_US,
        ),
        target(
            "host synchronizations of the hand-off",
            "0",
            waits,
            None if waits is None else waits == 0,
        ),
    ]


def target(text, wanted, value, met):
    verdict = "unmeasured" if met is None else "met" if met else "missed"
    return {"name": text, "target": wanted, "value": value, "verdict": verdict}
