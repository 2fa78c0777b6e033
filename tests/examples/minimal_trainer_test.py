"""The example that the README shows, run as the README says: two ranks and a daemon."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "bench"))
import launcher  # noqa: E402


def test_two_ranks_fit_one_line():
    with launcher.Launcher() as processes:
        here = launcher.Node()
        _, path = processes.start_daemon(os.environ["GRADSYNC_DAEMON"], here, None)
        ranks = []
        for rank in range(2):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "minimal",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "29500",
                "GRADSYNC_SOCKET": path,
            }
            command = [os.path.abspath("client/examples/minimal_trainer")]
            ranks.append(processes.start(f"rank {rank}", here, command, environment))
            processes.close_input(ranks[-1])
        processes.wait_for(lambda: all(rank.ended for rank in ranks))
    for number, rank in enumerate(ranks):
        assert list(rank.said) == [f"rank {number}: y = 3.000 x + 2.000"]
