"""A killed rank's replacement gets the state from a survivor, and the bits stay the same."""

import hashlib
import os
import pathlib
import signal
import threading

import gradsync
import numpy
import pytest
from daemon_process import DaemonProcess
from ranks import Ranks

RANKS = 3
STEPS = 8
DEATH = 4  # the step in which ranks are killed
# Several chunks of the daemon's staging memory below.
SHAPE = (700, 300)


@pytest.fixture(scope="module")
def small_daemon():
    """A daemon with little staging memory, so that a state moves in many chunks."""
    process = DaemonProcess("--staging_bytes=64KiB")
    before = os.environ.get("GRADSYNC_SOCKET")
    os.environ["GRADSYNC_SOCKET"] = process.socket
    yield process
    process.close()
    if before is None:
        del os.environ["GRADSYNC_SOCKET"]
    else:
        os.environ["GRADSYNC_SOCKET"] = before


class Model:
    """A weight, its momentum, and a running mean that only rank 0 computes, as BatchNorm does."""

    def __init__(self):
        self.weight = numpy.ones(SHAPE, "f4")
        self.momentum = numpy.zeros(SHAPE, "f4")
        self.mean = numpy.zeros(16, "f8")
        self.step = numpy.zeros((), "i8")
        self.on_read = lambda: None

    def items(self):
        self.on_read()
        return [
            ("weight", self.weight),
            ("weight.momentum", self.momentum),
            ("mean", self.mean),
            ("step", self.step),
        ]

    def load(self, image):
        for name, mine in (
            ("weight", self.weight),
            ("weight.momentum", self.momentum),
            ("mean", self.mean),
            ("step", self.step),
        ):
            mine[...] = numpy.frombuffer(image.items[name], mine.dtype).reshape(mine.shape)

    def gradient(self, rank, step):
        noise = numpy.random.default_rng([rank, step]).standard_normal(SHAPE, "f4")
        return self.weight * numpy.float32(0.01) + noise

    def update(self, gradient, mean):
        self.momentum *= numpy.float32(0.9)
        self.momentum += gradient
        self.weight -= numpy.float32(0.1) * self.momentum
        self.mean[:] = mean
        self.step += 1

    def digest(self):
        every = (self.weight, self.momentum, self.mean, self.step)
        return hashlib.sha256(b"".join(x.tobytes() for x in every)).hexdigest()[:16]


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def first_time(folder, what):
    """Whether no process has done this before."""
    try:
        (pathlib.Path(folder) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def heal(session, model, folder, victim, deaths):
    """What a replacement does before its first step; returns its layout."""
    (current,) = session.current_layouts()
    layout = session.register_layout(
        current.name,
        parameters=current.parameters,
        bucket_cap_bytes=current.bucket_cap_bytes,
        first_bucket_cap_bytes=current.first_bucket_cap_bytes,
        last_bucket_cap_bytes=current.last_bucket_cap_bytes,
        op=current.op,
        buffer_bytes=current.buffer_bytes,
    )
    assert current.step == layout.next_step
    session.serve_state(model.items)
    dies = "fetch" in deaths and first_time(folder, "fetch")
    if dies:
        # The source's function says when it is read.
        pipe = pathlib.Path(folder) / "reading"
        threading.Thread(target=lambda: (pipe.read_bytes(), kill_me()), daemon=True).start()
    while True:
        image = session.fetch_state()
        if dies:  # that thread was late
            kill_me()
        assert image.source != session.rank
        model.load(image)
        if "confirm" in deaths and first_time(folder, "confirm"):
            model.on_read = kill_me
        try:
            session.confirm_state()
        except gradsync.AbortedError as error:
            assert error.reason == gradsync.Reason.STATE_INTERRUPTED
            continue
        return layout


def tell_reading(folder):
    """Wakes the replacement that waits for the reading, if there is one."""
    try:
        pipe = os.open(pathlib.Path(folder) / "reading", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    os.write(pipe, b"x")
    os.close(pipe)


def train(folder, victim, deaths):
    """Returns the digests of averages and state after each of this process's steps."""
    model = Model()
    chain = {}
    with gradsync.Session.join(on_rank_loss="hold", state_source="survivor") as session:
        mine = session.rank == victim
        if session.is_replacement:
            layout = heal(session, model, folder, victim, deaths)
        else:
            model.on_read = lambda: tell_reading(folder)
            session.serve_state(model.items)
            layout = session.register_layout(
                parameters=[gradsync.Parameter("weight", SHAPE)],
                bucket_cap_bytes=400_000,
                buffer_bytes=model.mean.nbytes,
            )
        gradient = layout.gradient(0).numpy().reshape(SHAPE)
        buffers = layout.buffers.numpy().view("f8")
        while layout.next_step <= STEPS:
            step = layout.next_step
            layout.set_position(0, step)
            dies = mine and step == DEATH
            gradient[:] = model.gradient(session.rank, step)
            buffers[:] = (model.mean + gradient[0, 0]) if session.rank == 0 else 0
            layout.mark_ready(step, 0)
            if dies and "marked" in deaths and first_time(folder, "marked"):
                kill_me()
            layout.finish_step(step)
            if dies and "ended" in deaths and first_time(folder, "ended"):
                layout.wait_bucket(step, 1, 60)  # the daemon has the message of finish_step()
                kill_me()
            layout.wait_step(step, 60)
            average = hashlib.sha256(gradient.tobytes()).hexdigest()[:16]
            model.update(gradient, buffers)
            chain[step] = average, model.digest()
        session.check_in_sync(model.items)
    return chain


def run(folder, victim=None, deaths=()):
    """Every rank's chain."""
    os.mkfifo(folder / "reading")
    ranks = Ranks(train, RANKS, str(folder), victim, deaths)
    try:
        for _ in deaths:
            ranks.replace_dead(victim)
    except BaseException:
        ranks.kill()
        raise
    return ranks.results()


@pytest.fixture(scope="module")
def chain(small_daemon, tmp_path_factory):
    """The chain of a run without a loss."""
    first, *others = run(tmp_path_factory.mktemp("no-loss"))
    assert sorted(first) == list(range(1, STEPS + 1))
    assert others == [first] * (RANKS - 1)
    return first


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "deaths",
    [
        ("marked",),
        ("ended",),
        ("marked", "fetch"),
        ("ended", "confirm"),
        ("marked", "fetch", "confirm"),
    ],
    ids="-".join,
)
def test_a_killed_rank_is_healed_and_the_bits_are_the_same(chain, tmp_path, victim, deaths):
    for rank, found in enumerate(run(tmp_path, victim, deaths)):
        begun = 1
        if rank == victim:
            begun = DEATH if deaths[0] == "marked" else DEATH + 1
        assert found == {step: chain[step] for step in range(begun, STEPS + 1)}
