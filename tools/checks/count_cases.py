"""Counts the test cases of Bazel runs, and shows what those that failed or were skipped said.

Usage: count_cases.py FOLDER CONFIG...

FOLDER holds for each CONFIG the run's build events (CONFIG.json) and Bazel's exit status
(CONFIG.status). Cases are read from the test.xml files that the run names, so results of earlier
runs do not count. The last line is `N passed, N failed`, with `, N skipped` if any were.
"""

import collections
import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree

# Lines shown of each failure: pytest's reason is at the end of a long one, GoogleTest's is short.
# The stack of a test that hangs has some 40.
SHOWN = 60


class Count:
    """Cases by outcome, over all runs."""

    def __init__(self):
        self.passed = 0
        self.skipped = collections.Counter()  # texts: the test, and why it skips cases
        self.failed = []  # texts: the case, where its output is, and the end of it

    def add_cases(self, config, label, passed, log, report):
        """Adds what one execution of a test reported.

        Args:
          config: name of the run.
          label: the test's Bazel label.
          passed: whether Bazel says so.
          log: file with the test's output.
          report: its test.xml; may be missing.
        """
        failed_before = len(self.failed)
        cases = 0
        try:
            root = xml.etree.ElementTree.parse(report).getroot()
        except (OSError, xml.etree.ElementTree.ParseError):
            root = ()
        for case in root.iter("testcase") if len(root) else ():
            cases += 1
            failures = case.findall("failure") + case.findall("error")
            if failures:
                name = ".".join(n for n in (case.get("classname"), case.get("name")) if n)
                # Where a test wrote no report, Bazel's has but a message, such as the exit code.
                said = "\n".join(failure.text or failure.get("message", "") for failure in failures)
                if not any(failure.text for failure in failures):
                    said = f"{text_of(log)}\n{said}"
                self.failed.append(f"{config} {label} {name}\n    {log}{end_of(said)}")
            elif (
                case.find("skipped") is not None
                or case.get("status") == "notrun"
                or case.get("result") in ("skipped", "suppressed")
            ):
                self.skipped[f"{config} {label}: {why_skipped(case)}"] += 1
            else:
                self.passed += 1
        if passed and cases == 0:
            self.passed += 1
        # A sanitizer's report at exit, a crash or a time-out fails a test whose cases all passed.
        if not passed and len(self.failed) == failed_before:
            self.failed.append(
                f"{config} {label} (outside of its cases)\n    {log}{end_of(text_of(log))}"
            )


def why_skipped(case):
    """The reason that a case gives. GoogleTest writes a line with the place above it."""
    skipped = case.find("skipped")
    said = "" if skipped is None else skipped.get("message") or skipped.text or ""
    lines = said.strip().splitlines()
    return " ".join(lines[1:] or lines) or "disabled, or without a reason"


def text_of(log):
    return log.read_text(errors="replace") if log.exists() else ""


def end_of(text):
    """The last lines of a text, each indented and on a line of its own."""
    return "".join(f"\n    | {line}" for line in text.splitlines()[-SHOWN:])


def path_of(outputs, name):
    """The local file of one output that an event names."""
    for output in outputs:
        if output.get("name") == name:
            return pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
    return pathlib.Path(f"(no {name})")


def count_run(folder, config, count):
    """Adds one run."""
    events = []
    stream = folder / f"{config}.json"
    if stream.exists():
        for line in stream.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                break  # Bazel was stopped while it wrote this line.
    failed_before = len(count.failed)
    executed = set()
    for event in events:
        if "testResult" in event:
            label = event["id"]["testResult"]["label"]
            result = event["testResult"]
            outputs = result.get("testActionOutput", [])
            executed.add(label)
            count.add_cases(
                config,
                label,
                result.get("status") == "PASSED",
                path_of(outputs, "test.log"),
                path_of(outputs, "test.xml"),
            )
    for event in events:
        if event.get("id", {}).get("targetCompleted") and not event.get("completed", {}).get(
            "success"
        ):
            label = event["id"]["targetCompleted"]["label"]
            if label not in executed:
                executed.add(label)
                count.failed.append(f"{config} {label} (not built)\n    see Bazel's output above")
    status = int((folder / f"{config}.status").read_text(encoding="utf-8"))
    if status != 0 and len(count.failed) == failed_before:
        count.failed.append(f"{config} Bazel failed with status {status}\n    see its output above")


def main():
    folder = pathlib.Path(sys.argv[1])
    count = Count()
    for config in sys.argv[2:]:
        count_run(folder, config, count)
    if count.skipped:
        print("Skipped:")
        for why, cases in sorted(count.skipped.items()):
            print(f"  {cases} of {why}")
    if count.failed:
        print("Failed:")
        for line in count.failed:
            print("  " + line)
    skipped = f", {sum(count.skipped.values())} skipped" if count.skipped else ""
    print(f"{count.passed} passed, {len(count.failed)} failed{skipped}", flush=True)
    return 1 if count.failed or count.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
