"""What ranks get: torchrun's variables, and the daemon that answers."""

import errno
import json
import os
import select
import subprocess
import sys
import textwrap

import pytest
from gradsync.run import command_line
from gradsync.run.launch import Launch
from gradsync.run.process import Process, why_unwatchable
from launched import TRAINER, Launched

SHOW = "import json; print(json.dumps(dict(os.environ)))"


def variables(printed):
    """{rank: environment} of ranks that ran SHOW."""
    lines = [line.partition(" | ") for line in printed.splitlines()]
    return {name.split()[-1]: json.loads(text) for name, _, text in lines}


def test_two_ranks_average(launch):
    status, out, err = launch("--nproc-per-node", "2", script=TRAINER).end()
    assert sorted(out.splitlines()) == [f"rank {rank} | 2 [0.5 0.5 0.5]" for rank in range(2)], err
    assert (status, err) == (0, "")


def test_ranks_get_what_torchrun_gives(launch, tmp_path):
    pytest.importorskip("torch")
    status, out, err = launch("--nproc_per_node=2", script=SHOW).end()
    assert status == 0, err
    ours = variables(out)
    # Each rank of torchrun writes a file: it does not say whose line is whose.
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, pathlib\n"
        "pathlib.Path(f\"{os.environ['RANK']}.json\").write_text(json.dumps(dict(os.environ)))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, script], cwd=tmp_path, check=True, timeout=100)
    assert ours.keys() == {"0", "1"}
    for rank, mine in ours.items():
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        given = {name for name in theirs if os.environ.get(name) != theirs[name]}
        assert {"RANK", "OMP_NUM_THREADS", "MASTER_PORT"} <= given
        # Addresses and names of the job; and torchrun keeps a store of its own.
        differ = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
        differ |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
        # torchrun's own options, and the size of a terminal that it makes up.
        differ |= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
        assert {name: mine.get(name) for name in given - differ} == {
            name: theirs[name] for name in given - differ
        }
        assert int(mine["MASTER_PORT"]) > 0 and mine["MASTER_ADDR"] == "127.0.0.1"
        assert mine["TORCHELASTIC_RUN_ID"] == ours["0"]["TORCHELASTIC_RUN_ID"]


def test_ranks_of_a_second_node_count_on(launch):
    words = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 2 --rdzv-id=mine"
    status, out, err = launch(*words.split(), script=SHOW).end()
    assert status == 0, err
    found = variables(out)
    assert found.keys() == {"2", "3"}
    assert {
        name: found["3"][name]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    } == dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", GROUP_RANK="1")
    for name, value in dict(
        MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="mine"
    ).items():
        assert found["2"][name] == found["3"][name] == value


def test_the_port_of_rank_0_is_held_until_it_listens(launch):
    """A second launcher, or a connection, that gets the port makes rank 0 fail."""
    script = """
        import errno, os, socket
        address = ("", int(os.environ["MASTER_PORT"]))
        with socket.socket() as stranger:
            try:
                stranger.bind(address)
            except OSError as error:
                print(errno.errorcode[error.errno])
        socket.create_server(address).listen()  # with SO_REUSEADDR, as PyTorch's store
    """
    status, out, err = launch("--nproc-per-node=1", script=textwrap.dedent(script)).end()
    assert (status, out, err) == (0, "rank 0 | EADDRINUSE\n", "")


def test_threads_of_openmp_are_the_users_if_set(launch):
    ends = {}
    for given, ranks in (("7", 2), (None, 2), (None, 1)):
        words = ("--nproc-per-node", ranks)
        environment = {"OMP_NUM_THREADS": given}
        script = "print(os.environ.get('OMP_NUM_THREADS'))"
        _, out, _ = launch(*words, script=script, environment=environment).end()
        ends[given, ranks] = {line.split(" | ")[1] for line in out.splitlines()}
    assert ends == {("7", 2): {"7"}, (None, 2): {"1"}, (None, 1): {"None"}}


def test_a_module_gets_the_arguments(launch, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    status, out, err = launch("-m", "package.train", "--nnodes", "-m", "x y").end()
    assert (status, out) == (0, "rank 0 | ['--nnodes', '-m', 'x y']\n"), err


def test_a_program_that_is_not_pythons(launch):
    status, out, err = launch("--no-python", "/bin/sh", "-c", 'echo "$RANK of $WORLD_SIZE"').end()
    assert (status, out) == (0, "rank 0 | 0 of 1\n"), err


def test_a_program_that_does_not_exist(launch):
    status, _, err = launch("--no-python", "/nonexistent/program").end()
    assert status == 1 and "rank 0 cannot start" in err and "/nonexistent/program" in err


@pytest.mark.parametrize("start", ["start", "again"])
def test_a_daemon_that_answers_is_used_and_stays(launch, daemon, start):
    """Twice: the second launch finds the daemon that the first one used."""
    script = "print(os.environ['GRADSYNC_SOCKET'])"
    status, out, err = launch(script=script).end()
    assert (status, out, err) == (0, f"rank 0 | {daemon.socket}\n", "")


def test_several_nodes_need_a_daemon(launch_alone):
    words = "--nnodes 2 --node-rank 0 --master-addr localhost".split()
    status, out, err = launch_alone(*words, script="print('no')").end()
    assert (status, out) == (1, "")
    assert "none.sock (there is no such socket)" in err and "--peer_listen" in err


def test_a_kernel_without_pidfd(tmp_path, monkeypatch, capfd):
    def pidfd_open(_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    options = command_line.parse(["--no-python", "/bin/touch", str(tmp_path / "started")])
    assert Launch(options).run() == 1
    said = capfd.readouterr().err
    assert "pidfd_open: Operation not permitted" in said and "seccomp" in said
    assert not (tmp_path / "started").exists()


def test_a_python_without_pidfd_open(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert why_unwatchable() is None
    process = Process("rank 0", ["/bin/sh", "-c", "exit 3"], {})
    assert select.select([process.pidfd], [], [], 60)[0]
    process.reap(0.0)
    process.close()
    assert process.status == 3


def test_the_standard_input_of_ranks_is_empty(tmp_path, daemon):
    with Launched(script="print(repr(sys.stdin.read()))", folder=tmp_path) as launched:
        status, out, _ = launched.end()
    assert (status, out) == (0, "rank 0 | ''\n")
