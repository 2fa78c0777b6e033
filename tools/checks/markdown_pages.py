"""Checks every Markdown page: each relative link leads to a file, and to a heading of it; each
`Class::Member` is in the sources; and no line has more than 100 columns.

Tables and code blocks may have longer lines. So may a line of one word, link or command, which
cannot be wrapped.

Prints a line `file:line: what is wrong` per fault. The exit status is 1 if there is a fault.
"""

import pathlib
import re
import subprocess
import sys

COLUMNS = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
# A member of a class of ours: both names begin with a capital letter.
MEMBER = re.compile(r"`[^`\n]*?\b([A-Z]\w*)::([A-Z]\w*)[^`\n]*`")
WORD = re.compile(r"\w+")
BULLET = re.compile(r"^\s*([-*>]|\d+\.)\s+")
# What stays on one line: a command, a link with what touches it, or a word.
PIECE = re.compile(r"(?:`[^`]*`|!?\[[^\]]*\]\([^)\s]+\)|\S)+")


def anchor(heading):
    """The anchor that GitHub makes: lower case, without punctuation, with hyphens for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_link(page, link):
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


def too_long(line):
    """True if the line has too many columns and could be wrapped."""
    return len(line) > COLUMNS and len(PIECE.findall(BULLET.sub("", line))) > 1


def words_of_the_sources():
    """Every word of the C++ and protocol files."""
    listed = subprocess.run(
        ["git", "ls-files", "*.h", "*.cc", "*.cu", "*.proto"],
        capture_output=True,
        text=True,
        check=True,
    )
    files = [pathlib.Path(name) for name in listed.stdout.splitlines()]
    return {word for file in files if file.exists() for word in WORD.findall(file.read_text())}


def faults(page, words):
    """Yields (line, what is wrong). `words`: of the sources."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|") and too_long(line):
            yield number, f"{len(line)} columns; {COLUMNS} allowed"
        for name in (f"{a}::{b}" for a, b in MEMBER.findall(line) if not {a, b} <= words):
            yield number, f"{name}: the sources have no such name"
        for link in LINK.findall(line):
            if what := broken_link(page, link):
                yield number, what


def main():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    )
    failed = False
    words = words_of_the_sources()
    for name in listed.stdout.splitlines():
        page = pathlib.Path(name)
        if not page.exists():
            continue
        for number, what in faults(page, words):
            print(f"{name}:{number}: {what}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
