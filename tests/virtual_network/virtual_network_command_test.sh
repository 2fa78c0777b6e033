#!/bin/bash
# The command virtual-network: what it prints, how long its nodes live, and what it refuses.
set -euo pipefail

program=$PWD/tools/virtual_network/virtual-network
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

line=$("$program" --loopback --nodes=3 </dev/null)
[[ $line == *'"kind":"loopback"'* && $line == *'"address":"127.0.0.3"'* ]] || fail "$line"

coproc network { exec "$program" --rate=100mbit; }
pid=$!
read -r -t 40 -u "${network[0]}" line || fail 'no description'
echo "$line"
if [[ $line == *'"kind":"namespaces"'* ]]; then
  prefix=$(grep -o '/usr/bin/nsenter","--net=[^"]*' <<<"$line" | tail -n 1 | tr '",' '  ')
  # shellcheck disable=SC2086
  $prefix grep -q 10.99.0.2 /proc/self/net/fib_trie || fail "not node 1: $prefix"
fi
input=${network[1]}
exec {input}>&-
wait "$pid" || fail "its end: $?"

for wrong in --nodes=0 --nodes=251 --nodes=x --rate=fast --rate=0mbit --unknown 2; do
  status=0
  "$program" "$wrong" </dev/null 2>/dev/null || status=$?
  ((status == 2)) || fail "$wrong: $status"
done
"$program" --help </dev/null | grep -q Usage || fail 'no help'
echo passed
