#!/bin/bash
# For tests that ask a real daemon: starts one, and jobs beside it. Sourced, from Bazel's runfiles.
#
# Sets `socket` and `failed`. Nothing waits by time: each start is over when the process says so.

readonly gradsyncd=daemon/gradsyncd live_job=tests/ctl/live_job
# A socket's path must be short, which Bazel's folders are not.
folder=$(mktemp -d /tmp/gradsync-ctl-XXXXXX)
readonly socket=$folder/d.sock
# shellcheck disable=SC2034 # the test's exit status
failed=0
started=()

cleanup() {
  local pid
  for pid in "${started[@]}"; do kill -KILL "$pid" 2>/dev/null; done
  rm -rf "$folder"
}
trap cleanup EXIT

# await FILE_DESCRIPTOR TEXT: reads lines until one contains TEXT.
await() {
  local line
  while IFS= read -r -t 60 -u "$1" line; do
    [[ $line != *"$2"* ]] || return 0
    echo "$line"
  done
  echo "FAILED: '$2' did not come" >&2
  exit 1
}

# Sets `daemon`, the process.
start_daemon() {
  exec {daemon_log}< <(exec "$gradsyncd" --socket="$socket" 2>&1)
  daemon=$!
  started+=("$daemon")
  await "$daemon_log" ' serving '
}

# Starts a job of two ranks that waits in its fourth step; tell_job moves it on. Sets `job`.
start_job() {
  rm -f "$folder/command"
  mkfifo "$folder/command"
  exec {job_output}< <(exec "$live_job" "$socket" "$1" <"$folder/command" 2>&1)
  job=$!
  started+=("$job")
  exec {job_command}>"$folder/command"
  await "$job_output" waiting
}

# tell_job COMMAND ANSWER
tell_job() {
  echo "$1" >&"$job_command"
  exec {job_command}>&-
  await "$job_output" "$2"
}

fail() {
  echo "FAILED: $1" >&2
  # shellcheck disable=SC2034
  failed=1
}

# ask STATUS COMMAND...: runs it into $out and $err and checks its exit status.
ask() {
  local expected=$1 got=0
  shift
  "$@" >"$folder/out" 2>"$folder/err" || got=$?
  out=$(<"$folder/out")
  err=$(<"$folder/err")
  # Shown with the test's output.
  printf '\n$ %s\n%s\n%s(exit status %d)\n' "$*" "$out" "${err:+$err$'\n'}" "$got"
  ((got == expected)) || fail "'$*' exits with $got instead of $expected"
}

# expect TEXT...: each is in $out.
expect() {
  local text
  for text in "$@"; do
    [[ $out == *"$text"* ]] || fail "'$text' is missing above"
  done
}
