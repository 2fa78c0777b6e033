#!/bin/bash
# Two nodes, each in a network namespace of its own. The link between them fails silently during
# traffic. Each node must name the other one soon after the silence limit. Skipped on machines that
# cannot make namespaces.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
node=$PWD/tests/engine/engine_node
silence_ms=1500
name=gsl$$
directory=$(mktemp -d)
nodes=() # processes

cleanup() {
  ((${#nodes[@]} == 0)) || kill -KILL "${nodes[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  ip netns delete "${name}a" 2>/dev/null || true
  ip netns delete "${name}b" 2>/dev/null || true
  rm -rf "$directory"
}
trap cleanup EXIT

if ! ip netns add "${name}a" 2>/dev/null || ! ip netns add "${name}b" 2>/dev/null ||
  ! ip link add veth0 netns "${name}a" type veth peer name veth0 netns "${name}b" 2>/dev/null; then
  echo "skipped: no network namespaces here"
  exit 0
fi
ip -n "${name}a" address add 10.98.0.1/24 dev veth0
ip -n "${name}b" address add 10.98.0.2/24 dev veth0
for side in a b; do
  ip -n "$name$side" link set lo up
  ip -n "$name$side" link set veth0 up
done

mkdir "$directory/store"
mkfifo "$directory/in-a" "$directory/in-b" "$directory/out-a" "$directory/out-b"
# start SIDE NUMBER ADDRESS
start() {
  ip netns exec "$name$1" "$node" "$directory/store" "$2" 2 "$3" "$silence_ms" $((8 << 20)) \
    <"$directory/in-$1" >"$directory/out-$1" &
  nodes+=($!)
}
start a 0 10.98.0.1
start b 1 10.98.0.2
exec 8>"$directory/in-a" 9>"$directory/in-b" 6<"$directory/out-a" 7<"$directory/out-b"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
# expect FD WORD
expect() {
  local line
  read -r -t 60 -u "$1" line || fail "no line, instead of $2"
  [[ $line == "$2"* ]] || fail "$line, instead of $2"
  echo "$line"
}

expect 6 connected
expect 7 connected
echo go >&8
echo go >&9
expect 6 moving
expect 7 moving
now_ns() { awk '{ printf "%.0f", $1 * 1e9 }' /proc/uptime; }
since=$(now_ns)
# tbf drops packets that are larger than its burst. With a burst of one byte, nothing passes any
# more, and both interfaces stay up.
for side in a b; do
  tc -n "$name$side" qdisc add dev veth0 root tbf rate 1kbit burst 1 limit 1
done
for other in 1 0; do
  fd=$((7 - other))
  line=$(expect "$fd" failed) || exit 1
  echo "$line"
  read -r _ code reason who at _ <<<"$line"
  [[ $code == DEADLINE_EXCEEDED && $reason == ENGINE_TIMEOUT && $who == "node-$other" ]] ||
    fail "expected ENGINE_TIMEOUT of node-$other"
  took_ms=$(((at - since) / 1000000))
  # The last message came up to a tenth of the limit before. /proc/uptime counts units of 10 ms. On
  # a busy machine everything takes longer; TCP itself would need 15 minutes.
  ((took_ms > silence_ms * 8 / 10 && took_ms < silence_ms + 20000)) || fail "after $took_ms ms"
done
echo passed
