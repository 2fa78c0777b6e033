#!/bin/bash
# Runs tests under Bazel with Debian's Python and its PyTorch 1.13, where that is installed: the
# oldest that gradsync.torch supports. run_debian_pytest.sh TEST.py...
set -euo pipefail

python=/usr/bin/python3
release=$("$python" -c 'import numpy, torch; print(torch.__version__)' 2>/dev/null) || release=none
if [[ $release != 1.13* ]]; then
  echo "skipped: $python has PyTorch $release, not Debian's 1.13 (apt-get install python3-torch)"
  exit 0
fi

# pytest is .venv's, which is pure Python; nothing else of .venv is seen.
tree=$(dirname "$(readlink -f "$0")")/../../../..
site=$TEST_TMPDIR/site
mkdir -p "$site"
for package in pytest _pytest py.py pluggy iniconfig packaging pygments; do
  ln -s "$tree"/.venv/lib/python3*/site-packages/"$package" "$site/"
done
ln -s "$tree"/.venv/lib/python3*/site-packages/{pytest,pluggy}-*.dist-info "$site/"

export GRADSYNC_LIBRARY=$PWD/client/libgradsync.so
export GRADSYNC_DAEMON=$PWD/daemon/gradsyncd
export PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$site
export HOME=$TEST_TMPDIR
arguments=(-p no:cacheprovider --basetemp="$TEST_TMPDIR/pytest" --junitxml="$XML_OUTPUT_FILE" -ra)
[[ -z ${TESTBRIDGE_TEST_ONLY-} ]] || arguments+=(-k "$TESTBRIDGE_TEST_ONLY")
exec "$python" -m pytest "${arguments[@]}" "$@"
