#!/bin/bash
# The README's example is the program that the tests compile and run, to the letter.
set -euo pipefail

# shellcheck disable=SC2016  # The backquotes are Markdown's.
shown=$(sed -n '/^```c++$/,/^```$/p' README.md | sed '1d;$d')
if [[ $shown != "$(cat client/examples/minimal_trainer.cc)" ]]; then
  echo 'README.md shows another program than client/examples/minimal_trainer.cc:' >&2
  diff <(echo "$shown") client/examples/minimal_trainer.cc >&2 || true
  exit 1
fi
