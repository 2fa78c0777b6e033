#!/bin/bash
# docs/errors.md has the reasons and status codes of error_reason.h, and Python has its reasons,
# in the same order. The Python package takes reasons from gradsync.Reason alone.
set -euo pipefail

# Lines of the form "RANK_LOST ABORTED".
in_header() {
  awk '/^\/\/ / { comment = comment substr($0, 3); next }
       /^inline constexpr Reason / {
         split($0, text, "\""); split(comment, part, /\. /); print text[2] part[1]
       }
       { comment = "" }' proto/gradsync/error_reason.h
}
# shellcheck disable=SC2016  # The backquotes are Markdown's.
in_page() { sed -nE 's/^\| `([A-Z_]+)` \| ([A-Z_, ]+) \|.*/\1 \2/p' docs/errors.md; }
in_python() { sed -nE 's/^    ([A-Z_]+): Final = "\1"$/\1/p' client/python/gradsync/reason.py; }

header=$(in_header)
if ! diff <(echo "$header") <(in_page); then
  echo 'docs/errors.md (>) differs from proto/gradsync/error_reason.h (<)' >&2
  exit 1
fi
[[ $(wc -l <<< "$header") -gt 50 ]]  # a parser that finds nothing finds no difference

names=$(cut -d' ' -f1 <<< "$header")
if ! diff <(echo "$names") <(in_python); then
  echo 'gradsync.Reason (>) differs from proto/gradsync/error_reason.h (<)' >&2
  exit 1
fi

# Docstrings of the package name reasons without quotation marks.
if bare=$(grep -RnE --include='*.py' --exclude=reason.py \
  "[\"'](${names//$'\n'/|})[\"']" client/python/gradsync); then
  echo "write Reason.NAME instead of the text:" >&2
  echo "$bare" >&2
  exit 1
fi
