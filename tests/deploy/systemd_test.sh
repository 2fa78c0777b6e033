#!/bin/bash
# Checks the systemd units: known keys and values only, a sandbox that scores at most 2.0, flags
# that gradsyncd accepts, and a stop time that leaves room for the drain.
set -uo pipefail

units=deploy/systemd
check_options=tests/deploy/check_options
failed=0

fail() {
  echo "FAILED: $1" >&2
  failed=1
}

for tool in systemd-analyze systemd-sysusers systemd-tmpfiles; do
  command -v "$tool" >/dev/null || {
    fail "$tool is missing: install Debian's package systemd (tools/setup --test does)"
    exit 1
  }
done

# A root directory with the distribution's units, ours, and a file to execute.
root=$TEST_TMPDIR/root
mkdir -p "$root"/etc/systemd/system "$root"/usr/lib/systemd "$root"/usr/local/bin
cp -r /usr/lib/systemd/system "$root"/usr/lib/systemd/
ln -s usr/lib "$root"/lib
printf '#!/bin/sh\n' >"$root"/usr/local/bin/gradsyncd
chmod +x "$root"/usr/local/bin/gradsyncd
cp "$units"/*.service "$units"/*.socket "$root"/etc/systemd/system/
# NVIDIA's programs, which the drop-in for GPUs and the unit of MPS start.
mkdir -p "$root"/usr/bin
for program in nvidia-modprobe nvidia-cuda-mps-control; do
  cp "$root"/usr/local/bin/gradsyncd "$root/usr/bin/$program"
done

# Prints the lines of a report of systemd-analyze that worsen the score.
opened() { grep '✗' "$1" | awk '{ print $2 }' | sort; }

# Prints all faults of the units. (The exit status of systemd-analyze does not show all of them.)
verify() {
  local names=()
  for unit in "$root"/etc/systemd/system/{gradsyncd*.{service,socket},nvidia-mps.service}; do
    names+=("/etc/systemd/system/${unit##*/}")
  done
  systemd-analyze verify --man=no --root="$root" "${names[@]}" 2>&1
}

found=$(verify) || fail 'systemd-analyze verify'
[[ -z $found ]] || fail "systemd-analyze verify: $found"

# The check itself works: it finds deliberate faults.
service=$root/etc/systemd/system/gradsyncd.service
cp "$service" "$TEST_TMPDIR/good"
for bad in Colour=red Nice=-100 SystemCallFilter=no_such_call; do
  sed "s/^Nice=.*/$bad/" "$TEST_TMPDIR/good" >"$service"
  [[ -n $(verify) ]] || fail "systemd-analyze verify takes $bad"
done
cp "$TEST_TMPDIR/good" "$service"

# With a higher limit the daemon could not give an engine its own priority back.
nice=$(sed -n 's/^Nice=//p' "$units/gradsyncd.service")
grep -qx "LimitNICE=$nice" "$units/gradsyncd.service" || fail "LimitNICE= is not $nice, as Nice= is"

systemd-analyze security --offline=true --threshold=20 --no-pager "$units/gradsyncd.service" \
  >"$TEST_TMPDIR/security" 2>&1 ||
  fail "the sandbox scores above 2.0: $(grep -v '✓' "$TEST_TMPDIR/security")"

# check_drop_in FILE SETTING PATTERN: FILE must open SETTING in the sandbox, and only lines that
# match PATTERN.
drop_in=$root/etc/systemd/system/gradsyncd.service.d
check_drop_in() {
  mkdir "$drop_in"
  cp "$units/$1" "$drop_in"
  found=$(verify) || fail "systemd-analyze verify with $1"
  [[ -z $found ]] || fail "systemd-analyze verify with $1: $found"
  systemd-analyze security --offline=true --root="$root" --threshold=20 --no-pager \
    gradsyncd.service >"$TEST_TMPDIR/with" 2>&1 ||
    fail "with $1 the sandbox scores above 2.0: $(grep -v '✓' "$TEST_TMPDIR/with")"
  diff <(opened "$TEST_TMPDIR/security") <(opened "$TEST_TMPDIR/with") >"$TEST_TMPDIR/opened"
  grep -qF "$2" "$TEST_TMPDIR/opened" || fail "$1 has no effect"
  grep '^>' "$TEST_TMPDIR/opened" | grep -vE "$3" | grep . && fail "$1 opens more than it should"
  rm -r "$drop_in"
}
# The network.
check_drop_in several-nodes.conf IPAddressDeny= 'PrivateNetwork|AddressFamilies|IPAddressDeny'
# NVIDIA's device files, writable and executable memory, and loopback for NCCL.
check_drop_in gpu.conf PrivateDevices= \
  'PrivateDevices|DeviceAllow|MemoryDenyWriteExecute|AddressFamilies|IPAddressDeny'

# In a user namespace every trainer would be user 65534.
if grep -qE '^(PrivateUsers|DynamicUser)=' "$units/gradsyncd.service"; then
  fail 'PrivateUsers= or DynamicUser= hides who calls'
fi

# value_of KEY: prints the value of a key of the service.
value_of() { sed -n "s/^$1=//p" "$units/gradsyncd.service"; }

read -ra command <<<"$(value_of ExecStart)"
flags=("${command[@]:1}")
[[ ${flags[*]} == *--config=/etc/gradsync/gradsyncd.textproto* ]] || fail 'ExecStart: no --config'
"$check_options" "${flags[@]/'/etc/gradsync/'/deploy/}" || fail "ExecStart: ${command[*]}"

drain=$(sed -n 's/^drain_timeout: "\([0-9]*\)s"$/\1/p' deploy/gradsyncd.textproto)
# kStopLimit of daemon/app/stop_guard.h, and 5 s to spare.
(($(value_of TimeoutStopSec) >= drain + 15 + 5)) ||
  fail "TimeoutStopSec does not outlast drain_timeout (${drain} s) by 20 s"

# The sockets have the paths and names that the daemon and its clients expect.
socket=$(sed -n 's/^socket: "\(.*\)"$/\1/p' deploy/gradsyncd.textproto)
for line in "gradsyncd.socket ListenStream=$socket" \
  "gradsyncd.socket FileDescriptorName=grpc" \
  "gradsyncd-fd.socket ListenSequentialPacket=${socket%.sock}-fd.sock" \
  "gradsyncd-fd.socket FileDescriptorName=fd"; do
  grep -qxF -- "${line#* }" "$units/${line%% *}" || fail "${line%% *}: expected ${line#* }"
done

# systemd can make the user and the folder that the units name.
mkdir -p "$root"/run
systemd-sysusers --root="$root" "$PWD/$units/sysusers.conf" >"$TEST_TMPDIR/sysusers" 2>&1 ||
  fail "sysusers.conf: $(<"$TEST_TMPDIR/sysusers")"
user=$(value_of User) group=$(value_of Group)
grep -q "^$user:" "$root/etc/passwd" || fail "sysusers.conf does not make the user $user"
grep -q "^$group:" "$root/etc/group" || fail "sysusers.conf does not make the group $group"
grep -qx "d ${socket%/*} 0750 $user $group -" "$units/tmpfiles.conf" ||
  fail "tmpfiles.conf does not make ${socket%/*} as RuntimeDirectory= does"

((failed)) || echo 'systemd units: all well'
exit "$failed"
