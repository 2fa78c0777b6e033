#!/bin/bash
# The daemon answers a real grpcurl, which knows none of its messages, by reflection over the Unix
# socket: list, describe, health, status, statistics, timeline.
set -uo pipefail

# Bazel links to this file from its sandbox; tools/setup puts grpcurl into the tree's .venv.
grpcurl=$(dirname "$(readlink -f "$0")")/../../.venv/bin/grpcurl
[[ -x $grpcurl ]] || {
  echo "FAILED: there is no $grpcurl: run 'tools/setup --test', which puts it there" >&2
  exit 1
}

. tests/ctl/live_daemon.sh
start_daemon
start_job digits

# grpcurl 1.8.6 takes a socket by -unix and its path, from / or from the working folder. (Address
# forms such as unix:///path came later.)
cd "$folder" || exit 1
for address in "$socket" d.sock; do
  ask 0 "$grpcurl" -plaintext -unix "$address" list
  expect gradsync.v1.GradientSync gradsync.v1.Introspection grpc.health.v1.Health \
    grpc.reflection.v1alpha.ServerReflection
done

# call METHOD [REQUEST]
call() { ask "${status:-0}" "$grpcurl" -plaintext -unix -d "${2-}" "$socket" "$1"; }
describe() { ask 0 "$grpcurl" -plaintext -unix "$socket" describe "$1"; }

describe gradsync.v1.Introspection
expect 'rpc GetStatus' 'rpc GetStats' 'rpc GetTimeline'
describe gradsync.v1.GradientSync
expect 'rpc Session ( stream .gradsync.v1.SessionRequest )'
describe gradsync.v1.LayoutStats
expect 'uint64 bytes_reduced' '.gradsync.v1.Straggler stragglers'
describe grpc.health.v1.Health
expect 'rpc Check'
# Messages of other files, down to google.rpc.
describe google.rpc.Status
expect 'string message'

call grpc.health.v1.Health/Check
expect '"status": "SERVING"'
for service in gradsync.v1.GradientSync gradsync.v1.Introspection; do
  call grpc.health.v1.Health/Check "{\"service\": \"$service\"}"
  expect '"status": "SERVING"'
done
# 64 + NOT_FOUND.
status=69 call grpc.health.v1.Health/Check '{"service": "gradsync.v1.Nothing"}'

call gradsync.v1.Introspection/GetStatus
expect '"state": "DAEMON_STATE_SERVING"' "\"socket\": \"$socket\"" '"job_id": "digits"' \
  '"state": "JOB_STATE_RUNNING"' '"world_size": 2' '"step": "4"' '"waiting_for": "' \
  'rank 1 has not marked'
call gradsync.v1.Introspection/GetStatus '{"job_id": "other"}'
[[ $out != *'"jobs"'* ]] || fail 'a job that was not asked for'
call gradsync.v1.Introspection/GetStats '{"job_id": "digits"}'
expect '"steps_complete": "3"' '"buckets_reduced": "6"' '"p50_us"' '"reduce_gbps"' \
  '"sessions_opened": "2"' '"gradient_norm": 5' '"steps_non_finite": "1"'
call gradsync.v1.Introspection/GetTimeline '{"job_id": "digits", "layout": "model", "steps": 2}'
expect '"step": "2"' '"step": "3"' '"VERDICT_COMPLETE"' '"ready_ns"'
status=69 call gradsync.v1.Introspection/GetTimeline '{"job_id": "digits", "layout": "other"}'

# So can the session's own service and the reasons of its errors. 64 + FAILED_PRECONDITION.
request='{"open_session": {"protocol": {"oldest": 99, "newest": 99}, "job_id": "x"}}'
status=73 call gradsync.v1.GradientSync/Session "$request"
expect '"session_ending"' '"reason":"VERSION"'

exit "$failed"
