#!/bin/bash
# tools/quickstart refuses wrong flags at once, before it installs or builds anything.
set -euo pipefail

failures=0

expect_refusal() {
  local wanted=$1 status=0 said
  shift
  said=$(tools/quickstart "$@" 2>&1) || status=$?
  if ((status != 2)) || [[ $said != "tools/quickstart: $wanted"* ]]; then
    echo "tools/quickstart $*: status $status, '$said'" >&2
    failures=$((failures + 1))
  fi
}

expect_refusal "--ranks takes a number from 1 to 8, not '9'" --ranks 9
expect_refusal "--ranks takes a number from 1 to 8, not '0'" --ranks=0
expect_refusal "--ranks takes a number from 1 to 8, not 'two'" --keep --ranks=two
expect_refusal "--nodes takes a number from 1 to 4, not '5'" --nodes 5
expect_refusal '--nodes times --ranks is 9, more than 8' --nodes=3 --ranks=3
expect_refusal '--ranks needs a value' --ranks
expect_refusal '--json needs a value' --json
expect_refusal "--steps takes a number from 1 to 1000000, not '-1'" --steps=-1
expect_refusal "unknown argument '--rank'" --rank 2
expect_refusal "unknown argument '2'" 2

if [[ $(tools/quickstart --help) != 'Usage: tools/quickstart'*'Exit status:'* ]]; then
  echo 'tools/quickstart --help says something else' >&2
  failures=$((failures + 1))
fi
exit $((failures > 0))
