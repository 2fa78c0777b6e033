#!/bin/bash
# What the program itself does with its arguments: where it writes, and its exit status.
set -uo pipefail

failed=0
folder=$(mktemp -d /tmp/gradsync_test.XXXXXX) # the path of a socket is short
trap 'rm -rf "$folder"' EXIT
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

# --check needs nothing but the configuration, and leaves nothing behind.
printf 'socket: "%s/d.sock"\nlog_file: "%s/log"\n' "$folder" "$folder" >"$folder/good.textproto"
expect 0 --check --config="$folder/good.textproto"
[[ $(<"$out") == 'configuration ok' ]] || fail "--check says $(<"$out")"
says_nothing "$err"
[[ $(ls "$folder") == good.textproto ]] || fail "--check made files: $(ls "$folder")"

# A start with the same fault fails with the same words and the same status.
same() {
  local status=$1 said
  shift
  expect "$status" --check "$@"
  says_nothing "$out"
  said=$(<"$err")
  expect "$status" "$@"
  [[ $(<"$err") == "$said" ]] || fail "--check $*: '$said'; a start: '$(<"$err")'"
}
same 2 --lease=1d
same 2 --log_file="$folder/none/log"
same 1 --socket="$folder/none/d.sock"
listen=(--socket="$folder/d.sock" --peer_listen=127.0.0.1:0)
same 1 "${listen[@]}" --peer_tls_certificate="$folder/none.crt"
same 1 "${listen[@]}" --peer_tls_{certificate,key,ca}="$folder/good.textproto"

((failed)) || echo 'arguments: all well'
exit "$failed"
