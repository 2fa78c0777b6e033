"""The report of a run, which is written again after each part."""

import datetime
import json
import re

from markdown import markdown

GOOD = ("passed", "holds", "measured", "met", "unmeasured", "not available", "not applicable")
KINDS = ("targets", "experiments", "tests", "benches", "python")


class Report:
    """`content` is the content of the JSON file."""

    def __init__(self, folder, commit, fakes):
        self.folder = folder
        # The first line of both files.
        warning = {"not_a_measurement": "fakes of driver and NCCL, on the CPU"} if fakes else {}
        now = datetime.datetime.now(datetime.timezone.utc)
        self.content = {
            **warning,
            "complete": False,
            "date": now.strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit,
            "machine": {},
            "packages": None,
            "logs_left_out": [],
            **{kind: [] for kind in KINDS},
        }

    def path(self, suffix):
        if "not_a_measurement" in self.content:
            return self.folder / f"fakes{suffix}"
        gpu = re.sub(r"\W+", "-", self.content["machine"]["gpus"][0]["name"].lower())
        return self.folder / f"{self.content['date'][:10]}-{gpu}{suffix}"

    def write(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            (".json", json.dumps(self.content, indent=1) + "\n"),
            (".md", markdown(self.content)),
        ):
            new = self.path(suffix + ".new")
            new.write_text(text)
            new.replace(self.path(suffix))

    def unexpected(self):
        """The names of what could run and is not as expected."""
        return [row["name"] for row in self.rows() if row["verdict"] not in GOOD]

    def named(self, verdict):
        """The names of what has this verdict."""
        return [row["name"] for row in self.rows() if row["verdict"] == verdict]

    def rows(self):
        return [row for kind in KINDS for row in self.content[kind]]
