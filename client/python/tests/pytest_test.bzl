"""Tests of the Python package."""

def pytest_test(name, srcs, deps = [], data = [], size = "medium", timeout = None, tags = []):
    """Runs pytest, with .venv's Python, on `srcs`; each of its cases counts as one.

    The package, libgradsync.so, gradsyncd and this folder's conftest.py are there.

    Args:
      name: of the target.
      srcs: files of tests; only these are collected.
      deps: other Python files: modules that the tests import, a conftest.py of their own.
      data: whatever else they need.
      size: as everywhere.
      timeout: as everywhere.
      tags: further tags. The sanitizers cannot be loaded into Python: always "noasan".
    """
    native.sh_test(
        name = name,
        size = size,
        timeout = timeout,
        srcs = ["//client/python/tests:run_pytest.sh"],
        args = ["$(locations %s)" % src for src in srcs],
        data = srcs + deps + data + [
            "//client:libgradsync.so",
            "//client/python:gradsync",
            "//client/python/tests:support",
            "//daemon:gradsyncd",
        ],
        tags = ["noasan"] + tags,
    )
