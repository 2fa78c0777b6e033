#!/bin/bash
# gradsyncctl, the program, asks a real daemon about a real job: every command, as text and as JSON,
# while a step runs, after a rank's loss, of a stopped daemon, and after the daemon's end.
set -uo pipefail

. tests/ctl/live_daemon.sh
export GRADSYNC_SOCKET=$socket
ctl=tools/gradsyncctl/gradsyncctl

ask 2 "$ctl" status
[[ $err == *"no daemon at $socket: start it with 'gradsyncd --socket=$socket'"* ]] || fail 'no hint'
ask 2 "$ctl" health

start_daemon
ask 0 "$ctl" health
expect OK SERVING
ask 0 "$ctl" status
expect 'no jobs' 'CONNECTIONS' # those of this question
ask 2 "$ctl" timeline

start_job digits
ask 0 "$ctl" status
expect 'serving' 'digits' 'running' '2/2' 'step 4 of model' 'rank 1'
ask 0 "$ctl" status --job digits
expect 'live' "$job"
ask 0 "$ctl" status --json
expect '"job_id": "digits"' '"state": "JOB_STATE_RUNNING"' '"step": "4"' '"missing_ranks": []' \
  '"missing_ranks_total": 0' '"connections_refused": "0"'
ask 0 "$ctl" stats
expect 'job digits' 'ready skew' 'exposed' 'P99' 'STRAGGLER' 'GRADIENT NORM' 'NON-FINITE'
ask 0 "$ctl" stats --json
expect '"steps_complete": "3"' '"buckets_reduced": "6"' '"steps_void": "0"' \
  '"gradient_norm": 5' '"non_finite": "0"' '"steps_non_finite": "1"'
ask 0 "$ctl" timeline
expect 'step 3 of model, job digits: complete'
[[ $(grep -c '[01+.]#\+d' <<<"$out") == 2 ]] || fail 'not 2 lines: 2 buckets'
ask 0 "$ctl" timeline --step 2
expect 'step 2 of model, job digits: complete'
ask 0 "$ctl" timeline --job digits --layout model --steps 64 --json
[[ $(grep -c '"verdict": "VERDICT_COMPLETE"' <<<"$out") == 3 ]] || fail 'not 3 steps'
ask 2 "$ctl" status --job other
ask 2 "$ctl" timeline --layout other
tell_job finish finished

# A job's statistics outlive it.
ask 0 "$ctl" status
expect 'ended'
ask 0 "$ctl" stats --json
expect '"steps_complete": "4"'

start_job digits
tell_job lose lost
ask 1 "$ctl" status --job digits
expect 'FAILED' 'failed: ' 'rank 1'
ask 1 "$ctl" stats
ask 0 "$ctl" health
ask 0 "$ctl" timeline --job digits

# A daemon that does not answer.
kill -STOP "$daemon"
ask 2 "$ctl" health --timeout 0.3
[[ $err == *'did not answer within 300ms'* ]] || fail 'no word of the timeout'
kill -CONT "$daemon"
ask 0 "$ctl" health

kill -KILL "$daemon"
cat <&"$daemon_log" # ends with the daemon
ask 2 "$ctl" health --json
expect '"code": "ERR"'
[[ $err == *"no daemon at $socket any more"* ]] || fail 'no hint'

exit "$failed"
