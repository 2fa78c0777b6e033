#!/bin/bash
# What the program itself does with its arguments: where it writes, and its exit status.
set -uo pipefail

failed=0
out=$TEST_TMPDIR/out
err=$TEST_TMPDIR/err

# expect STATUS FLAG...: the program ends with STATUS, within 40 s.
expect() {
  local expected=$1 status=0
  shift
  timeout 40 daemon/gradsyncd "$@" >"$out" 2>"$err" || status=$?
  ((status == expected)) || fail "gradsyncd $*: status $status, not $expected: $(<"$err")"
}

fail() {
  echo "FAILED: $1" >&2
  failed=1
}

says() { grep -qF -- "$2" "$1" || fail "expected '$2' in: $(<"$1")"; }

says_nothing() { [[ ! -s $1 ]] || fail "expected nothing in: $(<"$1")"; }

expect 0 --help
says "$out" '--quota_arena_bytes_per_user=SIZE'
says_nothing "$err"

expect 0 --version
says "$out" 'gradsyncd '
says_nothing "$err"

printf 'lease: "1d"\npeer_socket: ":7417"\n' >"$TEST_TMPDIR/bad.textproto"
expect 2 --config="$TEST_TMPDIR/bad.textproto" --colour=red
says_nothing "$out"
says "$err" 'bad.textproto:1: lease: "1d" is not a duration'
says "$err" 'bad.textproto:2: unknown field "peer_socket"'
says "$err" '--colour: unknown flag'

expect 2 --log_file="$TEST_TMPDIR/nowhere/log"
says "$err" 'does not exist'

((failed)) || echo 'arguments: all well'
exit "$failed"
