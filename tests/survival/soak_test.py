"""What tools/soak calls a fault."""

import dataclasses
import os
import subprocess
import sys

import pytest
from mortal_job import MortalJob
from neighbours import Attacker, JobEnded, Steps, attacks_of
from process_footprint import Footprint, footprint_of, grown
from soak import Round, faults_of, growth_of, line_of
from stranger_daemon import StrangerDaemon

IDLE = Steps(p50_us=2000, p99_us=3000, max_us=9000, wrong=0)
FAST = Steps(p50_us=100, p99_us=200, max_us=9000, wrong=0)
FOOTPRINT = Footprint(
    memory_kib=100_000, files=30, threads=20, mappings=500, processes=2, shared_files=3
)
FOOTPRINTS = {"attacked": FOOTPRINT, "other": FOOTPRINT}


def under(steps, idle=IDLE):
    return faults_of(Round("flood", {"small": idle}, {"small": steps}, FOOTPRINTS))


def test_a_job_within_its_bounds_has_no_fault():
    assert under(Steps(p50_us=6000, p99_us=15_000, max_us=10**6, wrong=0)) == []


def test_a_slow_median_a_slow_p99_and_a_wrong_sum_are_faults():
    assert under(Steps(6001, 15_000, 15_000, 0)) == [
        "flood: job small: p50_us 6001, 2000 without it; at most 6000"
    ]
    assert under(Steps(6000, 15_001, 15_001, 0)) == [
        "flood: job small: p99_us 15001, 3000 without it; at most 15000"
    ]
    assert under(Steps(2000, 3000, 3000, 1)) == ["flood: job small has 1 wrong sums"]


def test_a_step_that_is_longer_than_a_second_is_a_fault():
    assert under(Steps(2000, 3000, 1_000_001, 0)) == [
        "flood: job small: max_us 1000001, 9000 without it; at most 1000000"
    ]


def test_a_fast_step_may_take_a_millisecond_longer():
    assert under(Steps(1100, 1200, 1200, 0), FAST) == []
    assert under(Steps(1101, 1200, 1200, 0), FAST) == [
        "flood: job small: p50_us 1101, 100 without it; at most 1100"
    ]
    assert under(Steps(1100, 1201, 1201, 0), FAST) == [
        "flood: job small: p99_us 1201, 200 without it; at most 1200"
    ]


def test_an_error_of_the_attacker_is_a_fault():
    one = Round("flood", {"small": IDLE}, {"small": IDLE}, FOOTPRINTS, ("attack flood: why",))
    assert faults_of(one) == ["attack flood: why"]


def test_growth_of_each_node_is_known_after_three_cycles_of_at_least_eight_rounds():
    larger = dataclasses.replace(FOOTPRINT, files=10**6)
    for name in FOOTPRINTS:
        rounds = [Round("a", {}, {}, FOOTPRINTS) for _ in range(23)]
        assert growth_of(rounds, 2) is None
        rounds.append(Round("b", {}, {}, {**FOOTPRINTS, name: larger}))
        (fault,) = growth_of(rounds, 2)
        assert fault.startswith(f"node {name}: files has grown from 30 to")
        assert growth_of(rounds, 20) is None


def test_engines_that_single_rounds_leave_behind_are_no_growth():
    engine = dataclasses.replace(FOOTPRINT, processes=9, files=900, threads=90, mappings=9000)
    cycle = [Round("a", {}, {}, {"node": one}) for one in [FOOTPRINT] * 7 + [engine]]
    assert growth_of([*cycle, *cycle, *reversed(cycle)], 8) == []


def cycle(*each):
    """Rounds after which a daemon has so much memory, in KiB."""
    footprints = [dataclasses.replace(FOOTPRINT, memory_kib=kib) for kib in each]
    return [Round("a", {}, {}, {"node": one}) for one in footprints]


def test_memory_grows_if_most_rounds_have_more():
    first = cycle(*[1 << 20] * 7, 1 << 22)
    assert growth_of([*first, *first, *cycle(*[1 << 20] * 6, *[1 << 22] * 2)], 8) == []
    (fault,) = growth_of([*first, *first, *cycle(*[1 << 21] * 8)], 8)
    assert fault.startswith("node node: memory_kib has grown from 1048576 to 2097152")


@pytest.mark.parametrize("peak", [1, 2])
def test_a_peak_in_the_second_or_the_third_cycle_hides_no_growth(peak):
    cycles = [cycle(*[1 << 20] * 8) for _ in range(3)]
    cycles[peak] = cycle(*[1 << 22] * 8)
    before = sum(cycles, [])
    assert growth_of([*before, *cycle(*[1 << 20] * 8)], 8) == []
    (fault,) = growth_of([*before, *cycle(*[1 << 21] * 8)], 8)
    assert fault.startswith("node node: memory_kib has grown from 1048576 to 2097152")


def test_a_line_has_each_jobs_steps_and_the_footprints():
    other = dataclasses.replace(FOOTPRINT, files=31)
    footprints = {"attacked": FOOTPRINT, "other": other}
    words = line_of(Round("flood", {"small": IDLE}, {"small": FAST}, footprints), 12).split()
    nodes = "97.7 2 30 20 500 97.7 2 31 20 500"
    assert words == f"12 flood 100 0.05 200 0.07 9000 {nodes}".split()


def attack(program):
    """What was wrong with an attacker that runs this program."""
    return Attacker("flood", [sys.executable, "-c", program]).end()


READY = "import sys; print('READY', flush=True); "


def test_an_attacker_goes_on_until_its_input_ends():
    assert attack(READY + "sys.stdin.read()") == []


def test_an_attacker_that_ends_before_it_begins_is_a_fault():
    assert attack("") == ["attack flood exited with 0 before it began"]


def test_an_attacker_that_fails_is_a_fault_by_name():
    assert attack("import os; os.abort()") == ["attack flood was ended by SIGABRT"]
    assert attack(READY + "sys.exit('no socket')") == ["attack flood exited with 1: no socket"]
    assert attack("import sys; print('gone', flush=True); sys.stdin.read()") == [
        "attack flood does not begin: gone"
    ]


# Plays scripted_trainer. It refuses every command that begins with the file `refused`. Once it runs
# steps without end it says the file answerRANK, if there is one, and then writes to saidRANK.
TRAINER = f"""#!{sys.executable}
import pathlib, sys
folder, rank = pathlib.Path(__file__).parent, ""
for line in sys.stdin:
    rank = next((word[5:] for word in line.split() if word.startswith("rank=")), rank)
    answer = folder / ("answer" + rank)
    if "times=" not in line:
        refused = line.startswith((folder / "refused").read_text())
        print("code=ABORTED\tmessage=no" if refused else "code=OK", flush=True)
    elif answer.exists():
        print(answer.read_text(), flush=True)
        (folder / ("said" + rank)).write_text("x")
"""
TOLD = "code=ABORTED\treason=RANK_LOST\trank=1\tend_ns=0"
WRONG = "code=WRONG\tmessage=step 7, bucket 1, element 2: 3 instead of 4\tend_ns=0"


def mortal_job(folder, answers):
    """A job that runs steps, and whose ranks 0 to 2 have given these answers."""
    program = folder / "trainer"
    program.write_text(TRAINER)
    program.chmod(0o755)
    (folder / "refused").write_text("nothing")
    for rank, answer in enumerate(answers):
        if answer:
            (folder / f"answer{rank}").write_text(answer)
            os.mkfifo(folder / f"said{rank}")
    job = MortalJob(str(program), 12, "mortal", ["/x.sock"] * 3)
    job.begin()
    for rank, answer in enumerate(answers):
        if answer:
            (folder / f"said{rank}").read_text()
    return job


def test_survivors_that_name_the_lost_rank_are_no_fault(tmp_path):
    job = mortal_job(tmp_path, [TOLD, "", TOLD])
    assert job.lose(1) == []
    for rank in (0, 2):
        (tmp_path / f"answer{rank}").unlink()
    job.begin()
    assert job.faults() == []
    job.kill()


def test_a_survivor_that_learns_late_or_names_another_rank_is_a_fault(tmp_path):
    late = TOLD.replace("end_ns=0", f"end_ns={2**63}")
    job = mortal_job(tmp_path, [late, "", TOLD.replace("rank=1", "rank=0")])
    too_late, another = job.lose(1)
    assert too_late.startswith("rank 0 of job mortal heard after")
    assert another == "rank 2 of job mortal did not hear that rank 1 was lost: ABORTED RANK_LOST"
    job.kill()


def test_a_wrong_sum_of_any_rank_is_a_fault(tmp_path):
    job = mortal_job(tmp_path, [WRONG, WRONG, TOLD])
    assert job.lose(1) == [
        "rank 0 of job mortal did not hear that rank 1 was lost: "
        "WRONG step 7, bucket 1, element 2: 3 instead of 4",
        "rank 1 of job mortal: WRONG step 7, bucket 1, element 2: 3 instead of 4, "
        "before it was killed",
    ]
    job.kill()


def test_steps_that_end_although_no_rank_was_lost_are_a_fault(tmp_path):
    job = mortal_job(tmp_path, ["", "", WRONG])
    assert job.faults() == [
        "rank 2 of job mortal: WRONG step 7, bucket 1, element 2: 3 instead of 4"
    ]
    job.kill()


def test_a_job_that_does_not_begin_anew_is_known(tmp_path):
    job = mortal_job(tmp_path, [TOLD, "", TOLD])
    assert job.lose(1) == []
    (tmp_path / "refused").write_text("register")
    with pytest.raises(JobEnded, match="rank 0 of job mortal: register.*: ABORTED no"):
        job.begin()
    job.kill()


def test_attacks_are_those_that_the_program_lists(tmp_path):
    program = tmp_path / "attacker"
    program.write_text("#!/bin/sh\n[ $1 = --list ] && printf 'flood\\npeer_flood\\n'\n")
    program.chmod(0o755)
    programs = {"attacker": str(program), "memory_attacker": "/bin/memory_attacker"}
    attacks = attacks_of(programs, "/x.sock", "127.0.0.1:7", "/y.sock", 12, ["--victim_job=mortal"])
    assert attacks["flood"] == [
        str(program),
        "--attack=flood",
        "--socket=/x.sock",
        "--peer=127.0.0.1:7",
        "--other_socket=/y.sock",
        "--victim_job=mortal",
        "--uid=12",
    ]
    assert attacks["peer_flood"][1] == "--attack=peer_flood"
    assert attacks["unread_answers"] == ["/bin/memory_attacker", "/x.sock", "unread", "16"]


# Plays gradsyncd: writes its options into its socket, and waits for the reader of the other one.
DAEMON = """#!/bin/sh
printf '%s ' "$@" > "${1#--socket=}"
side="${1#--socket=}"; side="${side%.sock}-fd.sock"
mkfifo "$side"; read line < "$side"
"""


def test_the_daemon_starts_workers_or_worker_starts_would_attack_nothing(tmp_path):
    program = tmp_path / "gradsyncd"
    program.write_text(DAEMON)
    program.chmod(0o755)
    with StrangerDaemon(str(program), tmp_path, "node", "127.0.0.1") as daemon:
        options = (tmp_path / "node.sock").read_text().split()
    assert options[0] == f"--socket={daemon.socket}"
    assert "--cuda_library=libcuda.so.1" in options


def test_everything_that_grows_is_a_fault():
    assert grown(FOOTPRINT, FOOTPRINT) == []
    for field in dataclasses.fields(Footprint):
        larger = dataclasses.replace(FOOTPRINT, **{field.name: 10**6})
        (fault,) = grown(FOOTPRINT, larger)
        assert fault.startswith(f"{field.name} has grown from")


def test_an_open_file_counts():
    before = footprint_of(os.getpid())
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        assert footprint_of(os.getpid()).files == before.files + 1
    finally:
        os.close(fd)
    assert before.memory_kib > 1000 and before.threads >= 1 and before.mappings > 10


def test_a_child_counts():
    before = footprint_of(os.getpid())
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    try:
        now = footprint_of(os.getpid())
    finally:
        child.communicate()
    assert now.processes == before.processes + 1
    assert now.mappings > before.mappings and now.memory_kib > before.memory_kib
