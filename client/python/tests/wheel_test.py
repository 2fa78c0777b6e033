"""The wheel that tools/wheel makes, in a virtual environment with PyTorch alone. No network."""

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import linked_packages
import pytest
import torch
from built_wheel import built_wheel, wheel_tool

# Under Bazel this folder has links to the tree's files; otherwise it is the tree.
_TREE = pathlib.Path(__file__).parents[3]

# What manylinux_2_36 lets a wheel leave to the system.
SYSTEM = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libstdc++.so.6",
    "libz.so.1",
    "linux-vdso.so.1",
}
BINARIES = (
    "gradsync/libgradsync.so",
    "gradsync/bin/gradsyncd",
    "gradsync/bin/gradsyncctl",
)


@pytest.fixture(scope="module")
def wheel():
    return built_wheel()


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new virtual environment, as after `pip install torch numpy` and `pip install WHEEL`."""
    folder = tmp_path_factory.mktemp("environment")
    # Making a pip of its own would take longer than all else here.
    clean(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    linked_packages.link(["torch", "numpy"], packages)
    # Debian's Python has a sitecustomize already.
    faster = pathlib.Path(__file__).parent / "interpreter/sitecustomize.py"
    (packages / "faster.pth").write_text(f"import runpy; runpy.run_path({str(faster)!r})\n")
    pip = (sys.executable, "-m", "pip", "--python", folder)
    # Finds what the wheel requires.
    clean(*pip, "install", "--no-index", wheel)
    clean(*pip, "check")
    return folder, packages


def clean(*command, folder="/"):
    """Runs a command that cannot see the tree; returns what it prints."""
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env={})
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_name_has_the_platforms_tag(wheel):
    assert re.fullmatch(r"gradsync-[0-9.]+-py3-none-manylinux_2_36_x86_64\.whl", wheel.name)


def test_it_contains_only_the_typed_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"gradsync/py.typed", "gradsync/run/__main__.py", *map(str, BINARIES)} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-.*\.", "-0.", top) for top in tops} == {
        "gradsync",
        "gradsync.libs",
        "gradsync-0.dist-info",
        "gradsync_torch_backend.py",
    }
    assert not [name for name in names if "test" in name or "__pycache__" in name]


@pytest.mark.parametrize("binary", BINARIES)
def test_it_contains_every_library_that_systems_may_lack(environment, binary):
    _, packages = environment
    lines = clean("/usr/bin/ldd", packages / binary).splitlines()
    assert len(lines) > len(SYSTEM)
    for line in lines:
        name, _, path = line.partition(" => ")
        name = pathlib.Path(name.split(" (")[0].strip()).name
        path = path.split(" (")[0]
        if name not in SYSTEM:
            assert os.path.dirname(os.path.realpath(path)) == str(packages / "gradsync.libs"), line


# Each external repository of the build, and how its licence's folder begins. The wheel has no
# library of CUDA or NCCL: their headers declare interfaces, and convert 16-bit numbers in our
# kernels.
LICENSES = {
    "abseil": "libabsl",
    "cuda": None,
    "googleapis": "googleapis-common-protos",
    "grpc": "libgrpc++",
    "highway": "libhwy",
    "nlohmann_json": "nlohmann-json",
    "openssl": "libssl",
    "protobuf": "libprotobuf",
    "spdlog": "libspdlog",
    "systemd": "libsystemd",
}


def test_it_contains_the_licence_of_all_that_is_linked(environment):
    _, packages = environment
    (information,) = packages.glob("gradsync-*.dist-info")
    bundled = information / "licenses/bundled"
    folders = {path.name for path in bundled.iterdir()}
    of_debian = [name for name in folders if (bundled / name / "copyright").exists()]
    files = clean("/usr/bin/dpkg-query", "--listfiles", *of_debian).splitlines()
    owned = {pathlib.Path(file).name for file in files}
    libraries = [path.name for path in (packages / "gradsync.libs").iterdir()]
    assert {re.sub(r"-[0-9a-f]{8}\.so", ".so", name) for name in libraries} <= owned
    labels = (pathlib.Path(__file__).parent / "linked_libraries").read_text().split()
    repositories = {label[1:].partition("//")[0] for label in labels}
    assert repositories and repositories <= LICENSES.keys()
    for begin in filter(None, map(LICENSES.get, repositories)):
        assert [name for name in folders if name.startswith(begin)], begin


def test_its_description_has_no_link_into_the_tree(environment):
    _, packages = environment
    (information,) = packages.glob("gradsync-*.dist-info")
    text = (information / "METADATA").read_text()
    assert "(`docs/your-script.md` of the source tree)" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_its_licences_are_whole_and_listed(environment):
    _, packages = environment
    (information,) = packages.glob("gradsync-*.dist-info")
    texts = [path for path in (information / "licenses").rglob("*") if path.is_file()]
    names = [str(path.relative_to(information / "licenses")) for path in texts]
    metadata = email.message_from_string((information / "METADATA").read_text())
    assert sorted(metadata.get_all("License-File")) == sorted(names)
    assert "LICENSE" in names
    for path in texts:
        text = path.read_text()
        assert len(text) > 500, path
        # Debian's texts refer to other files, which are there too.
        for name in re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", text):
            assert f"bundled/common-licenses/{name}" in names, path


@pytest.mark.parametrize("command", ["gradsyncd", "gradsyncctl"])
def test_the_commands_are_the_programs(environment, command):
    folder, packages = environment
    assert clean(folder / "bin" / command, "--version") == clean(
        packages / "gradsync/bin" / command, "--version"
    )
    wrong = subprocess.run([folder / "bin" / command, "--no-such-option"], capture_output=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith(command.encode() + b": ")


TRAINER = """
import sys, gradsync, gradsync._library
assert gradsync._library.library.path.startswith(sys.prefix), gradsync._library.library.path
with gradsync.Session.join() as session:
    layout = session.register_layout(parameters=[gradsync.Parameter("weight", (3,))])
    gradient = layout.gradient(0).numpy()
    gradient[:] = session.rank
    layout.finish_step(1)
    layout.wait_step(1)
    print(gradient, "torch" in sys.modules)
"""


def test_two_ranks_train_with_it_and_its_daemon(environment, tmp_path):
    folder, _ = environment
    (tmp_path / "train.py").write_text(TRAINER)
    launcher = (folder / "bin/python", "-m", "gradsync.run", "--nproc-per-node", "2")
    printed = clean(*launcher, "train.py", folder=tmp_path)
    assert sorted(printed.splitlines()) == [
        f"rank {rank} | [0.5 0.5 0.5] False" for rank in range(2)
    ]


BACKENDS = """
import sys
import torch.distributed as dist
print("gradsync" in dist.Backend.backend_list, "gradsync" in sys.modules)
"""


def test_pytorch_knows_the_process_group_without_an_import(environment):
    """And importing PyTorch does not load gradsync's library."""
    folder, _ = environment
    assert clean(folder / "bin/python", "-c", BACKENDS) == "True False\n"


def test_each_of_the_three_ways_trains_as_gloo_does(environment, tmp_path):
    folder, _ = environment
    for file in ("python/examples/train_digits.py", "examples/data/digits.csv.gz"):
        shutil.copy(_TREE / "client" / file, tmp_path)
    launcher = (folder / "bin/python", "-m", "gradsync.run", "--nproc-per-node", "2")

    def train(way):
        """Returns the share of the images that are recognized, and the parameters."""
        options = ("--data", "digits.csv.gz", "--backend", way, "--save", way)
        printed = clean(*launcher, "train_digits.py", *options, folder=tmp_path)
        (percent,) = re.findall(rf"rank 0 \| {way}, 2 ranks: .* ([\d.]+) % of 360 ", printed)
        return float(percent), torch.load(tmp_path / way)

    percent, parameters = train("ddp")
    assert percent > 95
    for way in ("group", "hook", "gradsync"):
        percent_of_way, parameters_of_way = train(way)
        assert percent_of_way == pytest.approx(percent, abs=0.3), way  # one image
        torch.testing.assert_close(parameters_of_way, parameters, rtol=0, atol=1e-5)


def test_help_exits_with_0_and_wrong_usage_with_2():
    assert "manylinux_2_36_x86_64" in wheel_tool("--help").stdout
    for wrong in (["--output"], ["--programs", ""], ["here"]):
        used = wheel_tool(*wrong)
        assert used.returncode == 2 and "tools/wheel: " in used.stderr
    assert wheel_tool("--programs", "/nonexistent").returncode == 1
