"""The command line of gradsync.run."""

import pytest
from gradsync.run import command_line


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "the following arguments are required: SCRIPT\n"),
        ("--nproc-per-node", "--nproc-per-node expected one argument"),
        ("--nproc-per-node 0 {script}", "--nproc-per-node takes a number from 1 to 256, not '0'"),
        ("--nproc_per_node=gpu {script}", "not 'gpu'; in a shell give $(nvidia-smi --list-gpus"),
        ("--nproc-per-node cpu {script}", "to 256, not 'cpu'; in a shell give $(nproc)"),
        ("--nproc-per-node auto {script}", "| wc -l) or $(nproc)"),
        ("--nnodes 1:4 {script}", "to 256, not '1:4'; the number of nodes is fixed"),
        ("--nnodes 0:0 {script}", "--nnodes takes a number from 1 to 256, not '0'"),
        ("--nnodes 2 {script}", "--nnodes 2 needs --node-rank (0 to 1, another on each node)"),
        ("--nnodes 2 --node-rank 0 {script}", "and --master-addr (where node 0 is"),
        ("--nnodes 2 --node-rank 2 --master-addr x {script}", "a number below --nnodes"),
        ("--node-rank 1 {script}", "--node-rank 1 needs --nnodes 2 or more"),
        ("--nnodes 2 --standalone {script}", "--standalone is a job on one node"),
        ("--master-port 65536 {script}", "--master-port takes a number from 1 to 65535"),
        ("--shutdown-timeout -1 {script}", "takes seconds from 0 to 86400, not '-1'"),
        ("--shutdown-timeout=nan {script}", "takes seconds from 0 to 86400, not 'nan'"),
        ("--no-python -m package", "--no-python and --module do not go together"),
        ("--max-restarts x {script}", "--max-restarts takes a number from 0 to 1000000, not 'x'"),
        ("--nnodes 2 --node-rank 0 --master-addr x --rdzv_backend=c10d {script}", "--rdzv_backend"),
        ("-t 3 {script}", "-t is torchrun's"),
        ("-r 3 {script}", "-r is torchrun's"),
        ("--run-path {script}", "--run-path is torchrun's"),
        ("--nproc 2 {script}", "unrecognized arguments: --nproc"),
        ("/nonexistent.py", "there is no script '/nonexistent.py'; for a module, use -m"),
    ],
)
def test_wrong_usage_is_named(words, message, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        command_line.parse(words.format(script=script).split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("gradsync.run: ") and message in said and "--help" in said


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes 1:1",
        "--max-restarts=0",
        "--rdzv-backend=c10d --rdzv_endpoint localhost:0 --rdzv-conf timeout=60",
    ],
)
def test_options_that_change_nothing_are_taken(words, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    options = command_line.parse([*words.split(), "--rdzv-id=a", str(script), "--rdzv-id"])
    plain = command_line.parse(["--rdzv-id=a", str(script), "--rdzv-id"])
    assert options == plain and options.nodes == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "python -m gradsync.run --nproc-per-node 2 train.py" in said
    assert "GRADSYNC_SOCKET" in said and "Exit status" in said
    assert max(map(len, said.splitlines())) <= 100


def test_words_after_the_script_are_its_own(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    options = command_line.parse([str(script), "--nnodes", "x", "--help"])
    assert options.command[-4:] == [str(script), "--nnodes", "x", "--help"]
    assert (options.ranks, options.nodes, options.master_addr) == (1, 1, "127.0.0.1")
