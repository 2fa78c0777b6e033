"""Several C++ files as one compilation, so that a check reads the headers they share only once.

Most of a check's time goes into headers. The unnamed namespace of each file and its main() get
names, so that two files may have helpers of the same name. A `using` that only another file of the
group needs is not found.
"""

import json
import pathlib
import re

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
_WITH_VALUE = ("-iquote", "-isystem", "-I", "-include")


class JoinedSources:
    """The text of several sources of one folder, one after the other.

    clang finds it beside the sources, where the configuration of their folder applies.

    Args:
      sources: paths from the top of the tree.
      folder: for this object's files.

    Attributes:
      path: of the text, for clang.
      overlay: a file that tells clang where the text really is: --vfsoverlay.
    """

    def __init__(self, sources, folder):
        self._starts = []  # (first line, source)
        lines, included = [], set()
        for number, source in enumerate(sources):
            self._starts.append((len(lines) + 1, source))
            own = set()
            for line in pathlib.Path(source).read_text(encoding="utf-8").splitlines():
                header = _INCLUDE.match(line)
                # A source that names a header twice keeps the second one, for the check to find.
                if header and header[1] in included and header[1] not in own:
                    line = ""
                if header:
                    own.add(header[1])
                # Inline: what is outside of it in the same file finds its names.
                if line == "namespace {":
                    line = f"inline namespace file_{number} {{"
                if line.startswith("int main("):
                    line = line.replace("main", f"main_{number}", 1)
                lines.append(line)
            included |= own
        text = pathlib.Path(folder, "text.cc")
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside = pathlib.Path(sources[0]).absolute().parent
        self.path = str(beside / "joined_sources.cc")
        self.overlay = pathlib.Path(folder, "overlay.yaml")
        file = {"type": "file", "name": "joined_sources.cc", "external-contents": str(text)}
        roots = [{"type": "directory", "name": str(beside), "contents": [file]}]
        self.overlay.write_text(json.dumps({"version": 0, "roots": roots}), encoding="utf-8")

    def named_in(self, output):
        """The sources that hold a line which `output` calls an error."""
        named = set()
        for number in re.findall(re.escape(self.path) + r":(\d+):\d+: error:", output):
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
