#!/bin/bash
# docs/errors.md has the reasons and status codes of error_reason.h, in the same order. The Python
# package compares errors with no other reason.
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
in_python() {
  grep -RhoE --include='*.py' 'reason [!=]= "[A-Z_]+"' client/python/gradsync |
    cut -d'"' -f2 | sort -u
}

header=$(in_header)
if ! diff <(echo "$header") <(in_page); then
  echo 'docs/errors.md (>) differs from proto/gradsync/error_reason.h (<)' >&2
  exit 1
fi
[[ $(wc -l <<< "$header") -gt 50 ]]  # a parser that finds nothing finds no difference

reasons=$(in_python)
[[ -n $reasons ]]
for reason in $reasons; do
  if ! grep -q "^$reason " <<< "$header"; then
    echo "client/python compares with $reason, which error_reason.h does not have" >&2
    exit 1
  fi
done
