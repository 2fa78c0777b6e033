#!/bin/bash
# Two nodes in network namespaces of their own, joined by a veth pair of a given rate, all-reduce
# buckets by the engine. Needs root. Usage:
#   bazel build //tests/engine:engine_bench //daemon:gradsyncd
#   tests/engine/engine_bench.sh RATE [engine_bench's options]...
# RATE is a rate of tc, such as 1gbit or 10gbit. Without options, the bench prints a table over
# lanes, chunk sizes and bucket sizes.
set -euo pipefail

rate=${1:?usage: engine_bench.sh RATE [OPTION]...}
shift
bench=$(cd "$(dirname "$0")/../.." && pwd)/bazel-bin/tests/engine/engine_bench
[[ -x $bench ]] || {
  echo "first: bazel build //tests/engine:engine_bench" >&2
  exit 2
}
case $rate in
  *gbit) bits=$((${rate%gbit} * 1000000000)) ;;
  *mbit) bits=$((${rate%mbit} * 1000000)) ;;
  *)
    echo "RATE in gbit or mbit" >&2
    exit 2
    ;;
esac

name=gsb$$
stores=$(mktemp -d)
# Runs a copy of the program, so that a build during the run changes nothing.
cp "$bench" "$stores/engine_bench"
bench=$stores/engine_bench
cleanup() {
  ip netns delete "${name}a" 2>/dev/null || true
  ip netns delete "${name}b" 2>/dev/null || true
  rm -rf "$stores"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "${name}a"
ip netns add "${name}b"
# The veth pair ends with its namespaces.
ip link add veth0 netns "${name}a" type veth peer name veth0 netns "${name}b"
# The burst is what the rate carries in 4 ms, which the kernel's timer needs. The queue is 20 ms.
burst=$((bits / 8 / 250))
for side in a b; do
  last=$([[ $side == a ]] && echo 1 || echo 2)
  ip -n "$name$side" address add "10.99.0.$last/24" dev veth0
  ip -n "$name$side" link set lo up
  ip -n "$name$side" link set veth0 up
  tc -n "$name$side" qdisc add dev veth0 root tbf rate "$rate" burst "$burst" latency 20ms
done

# run OPTION...: runs both nodes and prints one line.
run() {
  local store
  store=$(mktemp -d -p "$stores")
  local options=("--store=$store" --interface=veth0 "--rate=$bits" "$@")
  ip netns exec "${name}b" "$bench" --node=1 "${options[@]}" >/dev/null &
  ip netns exec "${name}a" "$bench" --node=0 "${options[@]}"
  wait $!
}

if (($# > 0)); then
  run "$@"
  exit
fi
for bytes in $((25 << 20)) $((100 << 20)); do
  for lanes in 1 2 4; do
    for chunk in $((256 << 10)) $((512 << 10)) $((1 << 20)) $((2 << 20)) $((4 << 20)); do
      run "--bytes=$bytes" "--lanes=$lanes" "--chunk=$chunk" --buckets=8 --warmup=2
    done
  done
done
