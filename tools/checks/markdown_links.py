"""Checks that every relative link in a Markdown page leads to a file, and to a heading of it.

Prints a line `file:line: what is wrong` per fault. The exit status is 1 if there is a fault.
"""

import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def anchor(heading):
    """The anchor that GitHub makes: lower case, without punctuation, with hyphens for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def fault(page, link):
    """What is wrong with one link, or None."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return f"{link}: there is no such file"
    if fragment and target.suffix == ".md":
        if fragment not in {anchor(heading) for heading in HEADING.findall(target.read_text())}:
            return f"{link}: {path or page} has no such heading"
    return None


def main():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    )
    faults = 0
    for name in listed.stdout.splitlines():
        page = pathlib.Path(name)
        if not page.exists():
            continue
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for link in LINK.findall(line):
                if what := fault(page, link):
                    print(f"{name}:{number}: {what}")
                    faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
