#!/bin/bash
# Runs a Python test with the packages of .venv, because Bazel does not manage them.
# Usage: python_test.sh TEST.py
set -euo pipefail

# In Bazel's sandbox this file is a link into the tree.
tree=$(dirname "$(readlink -f "$0")")/../..
python=$tree/.venv/bin/python
"$python" -c 'import kubernetes_validate' || {
  echo "kubernetes-validate is not in $tree/.venv: run tools/setup --test" >&2
  exit 1
}
# The working folder holds the test's data and may be read-only.
exec "$python" "$@"
