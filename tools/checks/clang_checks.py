"""Runs clang's checks over every C++ file that Bazel compiles, with Bazel's own flags.

Usage: clang_checks.py clang-tidy | thread-safety

Also writes compile_commands.json, which editors read. A file that passed is not checked again until
it, a header of the project that it includes, its flags or the configuration change.

clang-tidy checks several files of a folder as one. It checks each file of a group alone if the
group has a finding, and apart from the others if they do not compile together.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from joined_sources import JoinedSources, joined_flags

CACHE = pathlib.Path.home() / ".cache/gradsync/tidy"
CACHE_DAYS = 30

# Files that clang-tidy checks as one.
GROUP = 16

# Rooms that use only locks of one kind: the annotated mutex of daemon/base.
THREAD_SAFE_ROOMS = tuple(
    f"daemon/{room}/"
    for room in (
        "base",
        "arena",
        "reduce",
        "job",
        "session",
        "telemetry",
        "engine",
        "peer",
        "worker",
    )
)

# Flags that only GCC or Bazel understands. Those of the second list are followed by a value.
DROPPED = re.compile(
    r"-fno-canonical-system-headers|-frandom-seed=.*|-MD|-c|-g\d?|-U_FORTIFY_SOURCE"
    r"|-D_FORTIFY_SOURCE=.*|-Wunused-but-set-parameter|-Wno-free-nonheap-object|-D__\w+__=.*"
    r"|-std=c\+\+0x|-Wno-builtin-macro-redefined"
)
DROPPED_WITH_VALUE = ("-MF", "-o")

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def bazel(*arguments):
    return subprocess.run(["bazel", *arguments], check=True, capture_output=True, text=True).stdout


def clang_flags(arguments, source, output_base):
    """The flags of one compilation, for clang run from the top of the tree."""
    flags = []
    skip = False
    for argument in arguments[1:]:
        if skip:
            skip = False
        elif argument in DROPPED_WITH_VALUE:
            skip = True
        elif argument != source and not DROPPED.fullmatch(argument):
            # The tree has no external/, unlike Bazel's sandbox.
            if argument.startswith("external/"):
                argument = f"{output_base}/{argument}"
            flags.append(argument)
    return flags


def compilations():
    """Bazel's compilations of our own sources: {file: flags}."""
    output_base = bazel("info", "output_base").strip()
    actions = json.loads(
        bazel(
            "aquery", "--output=jsonproto", "--noinclude_artifacts", 'mnemonic("CppCompile", //...)'
        )
    ).get("actions", [])
    found = {}
    for action in actions:
        arguments = action["arguments"]
        source = arguments[arguments.index("-c") + 1]
        # Skips generated and external sources, and all but one compilation per file.
        if source.endswith(".cc") and os.path.isfile(source) and source not in found:
            if not source.startswith(("bazel-out/", "external/")):
                found[source] = clang_flags(arguments, source, output_base)
    return found


def write_compile_commands(found):
    commands = [
        {
            "directory": os.getcwd(),
            "file": source,
            "arguments": ["clang++-14", *flags, "-Wno-unknown-warning-option", "-c", source],
        }
        for source, flags in sorted(found.items())
    ]
    pathlib.Path("compile_commands.json").write_text(
        json.dumps(commands, indent=1), encoding="utf-8"
    )


class Tree:
    """Hashes a file together with the project's files and generated files that it includes."""

    def __init__(self):
        self._texts = {}  # path: (hash, included names), None if there is no such file

    def _read(self, path):
        if path not in self._texts:
            try:
                data = pathlib.Path(path).read_bytes()
                names = INCLUDE.findall(data.decode("utf-8", "replace"))
                self._texts[path] = (hashlib.sha256(data).hexdigest(), names)
            except OSError:
                self._texts[path] = None
        return self._texts[path]

    def digest(self, source, flags):
        roots = [
            flags[i + 1]
            for i, flag in enumerate(flags[:-1])
            if flag in ("-iquote", "-isystem", "-I") and not flags[i + 1].startswith("/")
        ]
        roots += [flag[2:] for flag in flags if re.match(r"-I[^/]", flag)]
        pending, seen = [source], {}
        while pending:
            path = pending.pop()
            text = self._read(path)
            if path in seen or text is None:
                continue
            seen[path] = text[0]
            for name in text[1]:
                for root in [os.path.dirname(path), *roots]:
                    candidate = os.path.normpath(os.path.join(root, name))
                    if self._read(candidate) is not None:
                        pending.append(candidate)
                        break
        return json.dumps(sorted(seen.items()))


def command(check, source, flags):
    if check == "clang-tidy":
        # Debian's libstdc++ uses what newer versions of clang call deprecated.
        quiet = ["-Wno-unknown-warning-option", "-Wno-deprecated-declarations"]
        return [".venv/bin/clang-tidy", "--quiet", source, "--", *flags, *quiet]
    return ["clang++-14", *flags, "-Wno-unknown-warning-option", "-fsyntax-only"] + [
        "-Wthread-safety",
        "-Werror",
        source,
    ]


def stamp(check, source, flags, tree):
    # Another clone has its external/ elsewhere.
    same = [re.sub(r"/[^ ]*/external/", "external/", flag) for flag in flags]
    key = [check, source, same, tree.digest(source, flags)]
    if check == "clang-tidy":
        for path in (".clang-tidy", "tools/requirements-test.txt"):
            key.append(pathlib.Path(path).read_text(encoding="utf-8"))
    return CACHE / hashlib.sha256(json.dumps(key).encode()).hexdigest()


def run(command_line):
    """The command's output if it failed, else None."""
    result = subprocess.run(command_line, capture_output=True, text=True)
    # clang-tidy reports on stdout and counts on stderr; the compiler reports on stderr.
    return None if result.returncode == 0 else result.stdout.strip() or result.stderr.strip()


def groups(check, sources):
    """Cuts the files into lists that are checked as one."""
    if check != "clang-tidy":
        return [[source] for source in sources]
    folders = {}
    for source in sorted(sources):
        folders.setdefault(os.path.dirname(source), []).append(source)
    return [
        folder[start : start + GROUP]
        for folder in folders.values()
        for start in range(0, len(folder), GROUP)
    ]


def check_group(check, group):
    """Checks {source: flags}; returns {source: output} of those that failed."""
    if len(group) == 1:
        ((source, flags),) = group.items()
        output = run(command(check, source, flags))
        return {} if output is None else {source: output}
    with tempfile.TemporaryDirectory() as folder:
        joined = JoinedSources(list(group), folder)
        tidy, *arguments = command(check, joined.path, joined_flags(group.values()))
        output = run([tidy, f"--vfsoverlay={joined.overlay}", *arguments])
    if output is None:
        return {}
    if "clang-diagnostic-error" not in output:
        parts = [[source] for source in group]
    else:
        apart = joined.named_in(output)
        if not apart or len(apart) == len(group):
            apart = list(group)[: len(group) // 2]
        parts = [apart, [source for source in group if source not in apart]]
    failed = {}
    for part in parts:
        failed.update(check_group(check, {source: group[source] for source in part}))
    return failed


def findings(outputs):
    """Each finding once, though many files include the header that it is in."""
    top = re.compile(re.escape(os.getcwd()) + r"/(\./)?")
    found = set()
    for output in outputs:
        blocks = re.split(r"\n(?=[^\s:]+:\d+:\d+: (?:error|warning): )", top.sub("", output))
        found.update(block.strip() for block in blocks)
    return sorted(found)


def forget_old_results():
    for entry in CACHE.iterdir():
        if entry.stat().st_mtime < time.time() - CACHE_DAYS * 86400:
            entry.unlink(missing_ok=True)


def main():
    check = sys.argv[1]
    found = compilations()
    write_compile_commands(found)
    CACHE.mkdir(parents=True, exist_ok=True)
    forget_old_results()
    tree = Tree()
    todo = {}
    for source, flags in found.items():
        if check == "thread-safety" and not source.startswith(THREAD_SAFE_ROOMS):
            continue
        mark = stamp(check, source, flags, tree)
        if mark.exists():
            mark.touch()
        else:
            todo[source] = (flags, mark)
    failures = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            pool.submit(check_group, check, {source: todo[source][0] for source in group}): group
            for group in groups(check, todo)
        }
        for job in concurrent.futures.as_completed(jobs):
            failures.extend(job.result().values())
            for source in jobs[job]:
                if source not in job.result():
                    todo[source][1].touch()
    for finding in findings(failures):
        print(finding)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr}")
