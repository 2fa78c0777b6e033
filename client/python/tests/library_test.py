"""Which libgradsync.so is loaded, which are refused, and what importing the package needs."""

import os
import pathlib
import subprocess
import sys

import gradsync
import pytest
from gradsync import _library, _programs

PACKAGE = pathlib.Path(gradsync.__file__).parent.parent


def run(code, **environment):
    """Runs `code` in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",  # not the tree, where Python would find the package
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **environment},
    )


def build(path, source):
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source, text=True, check=True
    )
    return str(path)


def test_a_library_of_another_version_is_refused(tmp_path):
    library = build(tmp_path / "libgradsync.so", "unsigned gradsync_abi_version(void){return 7;}")
    result = run("import gradsync", GRADSYNC_LIBRARY=library)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError:") and "library of another version" in last
    assert library in last and "ABI version is 7" in last and "needs 1" in last


@pytest.mark.parametrize(
    "source, message",
    [
        ("int other;", "is not gradsync's library"),
        ("unsigned gradsync_abi_version(void){return 1;}", "has no gradsync_error_code"),
    ],
)
def test_another_library_is_refused(tmp_path, source, message):
    library = build(tmp_path / "libgradsync.so", source)
    result = run("import gradsync", GRADSYNC_LIBRARY=library)
    assert result.returncode == 1 and message in result.stderr and library in result.stderr


def test_a_missing_or_broken_file_is_refused(tmp_path):
    absent = str(tmp_path / "libgradsync.so")
    result = run("import gradsync", GRADSYNC_LIBRARY=absent)
    assert f"cannot load its library {absent}" in result.stderr
    (tmp_path / "libgradsync.so").write_text("no ELF")
    assert "cannot load its library" in run("import gradsync", GRADSYNC_LIBRARY=absent).stderr


def test_the_places_without_a_library_are_named(tmp_path):
    package = tmp_path / "a" / "b" / "gradsync"
    package.mkdir(parents=True)
    for file in PACKAGE.glob("gradsync/*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    result = run("import gradsync", GRADSYNC_LIBRARY="", PYTHONPATH=str(package.parent))
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: gradsync finds no libgradsync.so")
    assert "tools/wheel" in last and str(package / "libgradsync.so") in last
    # Beside the package's own files it is found.
    os.symlink(os.environ.get("GRADSYNC_LIBRARY") or tree(), package / "libgradsync.so")
    code = "import gradsync._library as l; print(l.library.path)"
    result = run(code, GRADSYNC_LIBRARY="", PYTHONPATH=str(package.parent))
    assert result.stdout.strip() == str(package / "libgradsync.so"), result.stderr


def tree():
    return pathlib.Path(gradsync.__file__).resolve().parents[3] / "bazel-bin/client/libgradsync.so"


def test_importing_needs_neither_torch_nor_numpy():
    result = run(
        "import sys\n"
        "sys.modules['numpy'] = sys.modules['torch'] = None\n"  # importing them fails
        "import gradsync\n"
        "print(gradsync.DataType.BFLOAT16.item_size, gradsync.__version__)"
    )
    assert result.stdout.split() == ["2", gradsync.__version__], result.stderr


def test_importing_imports_neither_torch_nor_numpy():
    result = run("import sys, gradsync; print({'torch', 'numpy'} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.parametrize("version", ["1.13.1", "2.0.1+cu118"])
def test_an_old_pytorch_is_refused(version):
    result = run(
        "import sys, types\n"
        f"sys.modules['torch'] = types.SimpleNamespace(__version__={version!r})\n"
        "import gradsync.torch"
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: gradsync.torch needs PyTorch 2.1 or later"), last
    assert version in last and "pip install 'torch>=2.1'" in last


NUMPYLESS = """
import sys
sys.modules["numpy"] = None
import array, gradsync
with gradsync.Session.join(gradsync.SessionOptions(socket=sys.argv[1], job_id="x")) as session:
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(2)])
    view = layout.bucket(0)
    view.buffer[0] = 3
    layout.mark_ready(1, 0)
    layout.end_step(1)
    layout.wait_step(1)
    values = array.array("f", [1.5])
    session.all_reduce(values)
    print(view.buffer[0], values[0])
    try:
        view.numpy()
    except ImportError:
        print("no NumPy")
"""


def test_steps_run_without_numpy(daemon):
    result = subprocess.run(
        [sys.executable, "-c", NUMPYLESS, daemon.socket],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    assert result.stdout.split("\n") == ["3.0 1.5", "no NumPy", ""], result.stderr


def test_every_export_exists_and_is_documented():
    assert sorted(gradsync.__all__) == sorted(set(gradsync.__all__))
    for name in gradsync.__all__:
        assert getattr(gradsync, name).__doc__ or name == "LOWEST_LIVE_RANK"


@pytest.mark.parametrize(
    "find, module",
    [(_library.find, _library), (lambda: _programs.find("gradsyncctl"), _programs)],
    ids=["library", "program"],
)
def test_a_file_that_a_package_right_below_the_root_lacks_is_named(find, module, monkeypatch):
    """As `pip install --target /app` leaves it."""
    monkeypatch.delenv("GRADSYNC_LIBRARY", raising=False)
    monkeypatch.setattr(module, "__file__", "/nonexistent/gradsync/module.py")
    with pytest.raises((ImportError, FileNotFoundError), match="looked for /nonexistent/gradsync/"):
        find()
