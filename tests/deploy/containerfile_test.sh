#!/bin/bash
# The image installs the Debian packages of the libraries that the two programs are linked with. Its
# base images are named by digest.
set -uo pipefail

programs=(daemon/gradsyncd tools/gradsyncctl/gradsyncctl)
failed=0

fail() {
  echo "FAILED: $1" >&2
  failed=1
}

libraries() { LC_ALL=C readelf -d "$@" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u; }

# The package of a library's file. dpkg knows some by their path through /lib.
package_of() {
  local path
  path=$(readlink -f "$(/sbin/ldconfig -p | awk -v name="$1" '$1 == name { print $NF; exit }')")
  { dpkg -S "$path" || dpkg -S "${path#/usr}"; } 2>/dev/null | sed 's/:.*//'
}

# Packages that every Debian image has.
base=' libc6 libgcc-s1 libstdc++6 '

packages=()
for library in $(libraries "${programs[@]}"); do
  package=$(package_of "$library")
  [[ -n $package ]] || fail "no package of $library"
  [[ $base == *" $package "* ]] || packages+=("$package")
done
needed=$(printf '%s\n' "${packages[@]}" | sort -u)
installed=$(sed -n '/apt-get install/,/&&/s/^ *\(lib[^ ]*\) \\$/\1/p' deploy/Containerfile | sort)

[[ $needed == *libgrpc++* ]] || fail 'found no libraries'
difference=$(diff <(echo "$installed") <(echo "$needed")) ||
  fail "deploy/Containerfile (<) and what the programs need (>) differ: $difference"

# A tag can name another image tomorrow.
bases=$(sed -n 's/^FROM \([^ ]*\).*/\1/p' deploy/Containerfile)
[[ $bases == *debian* ]] || fail 'found no base images'
for base in $bases; do
  [[ $base =~ ^[^:@]+@(sha256:[0-9a-f]{64}|\$\{[A-Z_]*DIGEST\})$ ]] || fail "$base has no digest"
done

((failed)) || echo 'Containerfile: all well'
exit "$failed"
