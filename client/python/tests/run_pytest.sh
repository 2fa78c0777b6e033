#!/bin/bash
# Runs tests of the Python package under Bazel; see pytest_test.bzl. run_pytest.sh TEST.py...
set -euo pipefail

# Bazel links to this file from its sandbox.
tree=$(dirname "$(readlink -f "$0")")/../../..
python=$tree/.venv/bin/python
# Importing them here would take longer than many a test.
find='from importlib.util import find_spec; exit(not (find_spec("numpy") and find_spec("pytest")))'
"$python" -c "$find" || {
  echo "NumPy or pytest is not in $tree/.venv: run tools/setup --test" >&2
  exit 1
}

export GRADSYNC_LIBRARY=$PWD/client/libgradsync.so
export GRADSYNC_DAEMON=$PWD/daemon/gradsyncd
export PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD/client/python/tests/interpreter
export HOME=$TEST_TMPDIR
arguments=(-p no:cacheprovider --basetemp="$TEST_TMPDIR/pytest" --junitxml="$XML_OUTPUT_FILE" -ra)
# bazel test --test_filter=WORD
[[ -z ${TESTBRIDGE_TEST_ONLY-} ]] || arguments+=(-k "$TESTBRIDGE_TEST_ONLY")
# conftest.py prints there where a test hangs.
exec 3>&2
exec "$python" -m pytest "${arguments[@]}" "$@"
