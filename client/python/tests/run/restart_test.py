"""A rank that fails is started again, and takes its place if the job holds it."""

import os
import pathlib
import re

import pytest
from daemon_process import DaemonProcess
from launched import Launched

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
DIGITS = pathlib.Path(__file__).parents[3] / "examples/data/digits.csv.gz"
STEPS = 12
RANKS = 3

# A death, RANK:RESTARTS:CALL:STEP, is a SIGKILL in that call of the example; with "stop " before
# the call it is a SIGSTOP.
DEADLY = """
import runpy
import gradsync
example = runpy.run_path({example!r}, run_name="example")
deaths = {deaths!r}
here = os.environ["RANK"] + ":" + os.environ["TORCHELASTIC_RESTART_COUNT"] + ":"
def deadly(name, call, step_of, after):
    def run(*arguments):
        place = f"{{name}}:{{step_of(*arguments)}}"
        dies, stops = here + place in deaths, here + "stop " + place in deaths
        if dies and not after: os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments)
        if dies: os.kill(os.getpid(), signal.SIGKILL)
        if stops: os.kill(os.getpid(), signal.SIGSTOP)
        return result
    return run
Layout = gradsync.Layout
finish, wait, save = Layout.finish_step, Layout.wait_step, example["save"]
Layout.finish_step = deadly("before finish", finish, lambda _, step: step, False)
Layout.finish_step = deadly("after finish", Layout.finish_step, lambda _, step: step, True)
Layout.wait_step = deadly("after wait", wait, lambda _, step: step, True)
save = deadly("after save", save, lambda _, __, step, ___: step, True)
example["main"].__globals__["save"] = save
sys.argv = ["example", "--state", {state!r}, "--steps", "{steps}", "--data", {data!r}]
example["main"]()
"""


def run_example(folder, deaths=(), restarts=5):
    """Returns the launcher's exit status, output and errors."""
    script = DEADLY.format(
        example=str(EXAMPLES / "survive_a_loss.py"),
        deaths=deaths,
        state=str(folder / "state"),
        steps=STEPS,
        data=str(DIGITS),
    )
    words = ("--nproc-per-node", RANKS, "--max-restarts", restarts)
    return Launched(*words, script=script, folder=folder).end()


def model_in(out):
    (model,) = re.findall(r"rank 0 \| 12 steps: [\d.]+ % of 1797, model (\w+)$", out, re.MULTILINE)
    return model


@pytest.fixture(scope="module")
def model(daemon, tmp_path_factory):
    """What the run without a loss ends with."""
    status, out, err = run_example(tmp_path_factory.mktemp("no-loss"))
    assert (status, err) == (0, "")
    return model_in(out)


@pytest.fixture
def impatient_daemon(monkeypatch):
    """A daemon that takes a trainer for lost when it has said nothing for 6 s.

    A busy machine stops no trainer for as long.
    """
    process = DaemonProcess("--lease=6s")
    monkeypatch.setenv("GRADSYNC_SOCKET", process.socket)
    yield process
    process.close()


CALLS = ("before finish", "after finish", "after wait", "after save")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_takes_its_place_and_the_model_is_the_same(model, tmp_path, rank, call):
    status, out, err = run_example(tmp_path, [f"{rank}:0:{call}:5"])
    assert status == 0, err
    assert model_in(out) == model
    assert len(re.findall("goes on with step", out)) == 1
    assert re.search(rf"rank {rank} \(pid \d+\) ended: SIGKILL .*\. Restart 1 of 5\n", err), err


def test_many_losses_one_after_the_other_and_at_once(model, tmp_path):
    deaths = [f"{rank}:0:{CALLS[rank]}:{3 + 2 * rank}" for rank in range(RANKS)]
    deaths += ["0:1:before finish:4", "1:1:after finish:9", "2:1:after wait:9", "0:2:after save:11"]
    status, out, err = run_example(tmp_path, deaths)
    assert status == 0, err
    assert model_in(out) == model
    assert len(re.findall("goes on with step", out)) == len(deaths)
    # The second death of rank 0: what its process printed.
    assert re.search(r"Restart 2 of 5.*\n  the last lines of rank 0:\n    .*goes on with step", err)


def test_a_stopped_rank_is_killed_by_the_daemon_and_takes_its_place(
    model, tmp_path, impatient_daemon
):
    status, out, err = run_example(tmp_path, ["1:0:stop after finish:5", "2:0:stop after wait:8"])
    assert status == 0, err
    assert model_in(out) == model
    assert len(re.findall("goes on with step", out)) == 2
    for rank in (1, 2):
        assert re.search(rf"rank {rank} \(pid \d+\) ended: SIGKILL .*\. Restart 1 of 5\n", err), err


def test_a_rank_that_fails_too_often_ends_the_launch(daemon, tmp_path):
    deaths = [f"1:{restarts}:before finish:4" for restarts in range(3)]
    status, _, err = run_example(tmp_path, deaths, restarts=2)
    assert status == 137
    assert "Restart 1 of 2\n" in err and "Restart 2 of 2 in 1 s\n" in err, err
    assert re.search(r"rank 1 \(pid \d+\) failed first: SIGKILL", err)


def test_ranks_of_a_job_that_ends_with_a_loss_are_all_started_again(launch):
    script = (
        "import gradsync\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        "with gradsync.Session.join() as session:\n"
        "  session.barrier()\n"
        "  if session.rank == 1 and not again: os.kill(os.getpid(), signal.SIGKILL)\n"
        "  session.barrier()\n"
        "  print('generation', session.generation, os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
    )
    status, out, err = launch("--nproc-per-node", 2, "--max-restarts", 1, script=script).end()
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"rank {rank} | generation 2 1" for rank in range(2)]
    assert "RANK_LOST" in err


def test_a_rank_that_dies_after_it_has_left_ends_nobody(launch, tmp_path):
    ended = tmp_path / "ended"
    os.mkfifo(ended)
    script = (
        "import gradsync\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        f"if again: closed_at_the_end = open({str(ended)!r}, 'w')\n"
        "session = gradsync.Session.join(on_rank_loss='hold')\n"
        "session.barrier()\n"
        "session.leave()\n"
        "if session.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"open({str(ended)!r}).read()\n"
        "print('went on')\n"
    )
    status, out, err = launch("--nproc-per-node", 2, "--max-restarts", 1, script=script).end()
    assert (status, out) == (0, "rank 0 | went on\n"), err
    assert re.search(
        r"^gradsync.run: rank 1 \(pid \d+\) has nothing to do: .*a good end$", err, re.M
    )


def test_a_rank_that_raises_after_it_has_left_fails(launch):
    script = (
        "import gradsync\n"
        "gradsync.Session.join(on_rank_loss='hold').leave()\n"
        "raise OSError('no space for the model')\n"
    )
    status, _, err = launch("--max-restarts", 2, script=script).end()
    assert status == 1
    assert "no space for the model" in err and "good end" not in err


def test_a_job_id_of_another_run_is_no_good_end(launch):
    script = (
        "import gradsync\n"
        "gradsync.Session.join(on_rank_loss='hold', job_id='the same in each run').leave()\n"
    )
    status, _, err = launch(script=script).end()
    assert status == 0, err
    status, _, err = launch("--max-restarts", 1, script=script).end()
    assert status == 1
    assert "failed first" in err and "another run needs another job_id" in err


def test_a_signal_ends_the_launch_and_restarts_nothing(launch):
    script = "print('here', flush=True)\nsignal.pause()\n"
    with launch("--nproc-per-node", 2, "--max-restarts", 3, script=script) as launched:
        launched.read("here$", 2)
        launched.process.terminate()
        status, _, err = launched.end()
    assert status == 143
    assert "Restart" not in err
