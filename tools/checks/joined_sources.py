"""Several C++ files as one compilation, so that a check reads the headers they share only once.

Most of a check's time goes into headers: eight files of a folder take little longer than one. A
`using` that only another file of the group needs is not found.
"""

import pathlib
import re

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^>"]+[>"])')
_WITH_VALUE = ("-iquote", "-isystem", "-I", "-include")


class JoinedSources:
    """The text of several sources, one after the other, in one file.

    Args:
      path: the file to write; its name ends in ".cc".
      sources: paths.
    """

    def __init__(self, path, sources):
        self._starts = []  # (first line, source)
        lines, included = [], set()
        for source in sources:
            self._starts.append((len(lines) + 1, source))
            own = set()
            for line in pathlib.Path(source).read_text(encoding="utf-8").splitlines():
                header = _INCLUDE.match(line)
                # A source that names a header twice keeps the second one, for the check to find.
                if header and header[1] in included and header[1] not in own:
                    line = ""
                if header:
                    own.add(header[1])
                lines.append(line)
            included |= own
        self._path = str(path)
        pathlib.Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def named_in(self, output):
        """The sources that hold a line which `output` calls an error."""
        named = set()
        for number in re.findall(re.escape(self._path) + r":(\d+):\d+: error:", output):
            named.add([source for first, source in self._starts if first <= int(number)][-1])
        return named


def joined_flags(all_flags):
    """Every flag of any of the compilations, once, in the order of its first place."""
    joined = []
    for flags in all_flags:
        words = iter(flags)
        for flag in words:
            option = [flag, next(words)] if flag in _WITH_VALUE else [flag]
            if option not in joined:
                joined.append(option)
    return [word for option in joined for word in option]
