"""Turns the output of a part's process into a result: a verdict, a reason, figures."""

import json
import re

# tests/fakes/isolated_test.cc says this of a test.
NEEDS_FAKES = "passed up to the point that needs the fakes"


def read_tests(_, result, status, failure, text):
    for key, mark in {"passed": "       OK ", "failed": "  FAILED  "}.items():
        names = re.findall(rf"^\[{mark}\] (\S+\.\S+?),? \(\d+ ms\)", text, re.MULTILINE)
        result[key] = sorted(set(names))
    reasons = re.findall(r"Skipped\n(.*)\n+\[  SKIPPED \] (\S+) \(", text)
    # Nothing was wrong up to where they need the fakes.
    result["passed_in_part"] = sorted(name for why, name in reasons if NEEDS_FAKES in why)
    result["skipped"] = {name: why for why, name in reasons if NEEDS_FAKES not in why}
    if failure is None and status != 0 and not result["failed"]:
        failure = f"exit status {status}"
    if result["failed"] or failure:
        begun = set(re.findall(r"^\[ RUN +\] (\S+)", text, re.MULTILINE))
        done = {*result["passed"], *result["failed"], *(name for _, name in reasons)}
        why = [failure] if failure else []
        why += [", ".join(result["failed"])] if result["failed"] else []
        why += [f"in the middle of {name}" for name in sorted(begun - done)]
        result.update(verdict="failed", why="; ".join(why))
    else:
        result["verdict"] = (
            "passed" if result["passed"] or result["passed_in_part"] else "not available"
        )
        if result["verdict"] != "passed":
            result["why"] = "; ".join(sorted(set(result["skipped"].values())))


def read_experiment(_, result, status, failure, text):
    answer = {}
    for line in text.splitlines():
        if line.startswith('{"answer"'):
            answer = json.loads(line)
    # What it had found out before it ended badly.
    facts = {}
    for name, value in re.findall(r"^(\w+): (.+)$", text, re.MULTILINE):
        try:
            facts[name] = json.loads(value)
        except ValueError:
            continue
    result["facts"] = answer.get("facts", facts)
    expected = {0: "holds", 1: "does not hold", 77: "not available"}.get(status)
    if failure is None and answer.get("answer") == expected and expected is not None:
        result.update(verdict=expected, why=answer["why"])
    else:
        result.update(verdict="failed", why=failure or f"exit status {status}")


def read_bench(part, result, status, failure, text):
    if failure is None and status == 0:
        result.update(verdict="measured", figures=json.loads(part.json.read_text()))
    else:
        last = text.strip().splitlines()[-1:] or [""]
        result.update(verdict="failed", why=failure or f"exit status {status}: {last[0]}")
    # The table without the progress.
    result["table"] = "\n".join(line for line in text.splitlines() if re.match(r"[# ]", line))


def read_python(_, result, status, failure, text):
    last = (text.strip().splitlines() or [""])[-1]
    if failure is None and status == 0:
        result.update(verdict="passed", why=last)
    elif status == 77:
        result.update(verdict="not available", why=last)
    else:
        result.update(verdict="failed", why=failure or last)


READERS = {
    "tests": read_tests,
    "experiments": read_experiment,
    "benches": read_bench,
    "python": read_python,
}
