"""Runs the trials of a module in ranks; see trial.py."""

import os

import pytest
from ranks import RankFailed, run_ranks
from trial_ranks import Outcomes, read_outcomes, run_trials

# For all trials of a module together; Bazel's limit is 900 s.
TIMEOUT_S = 600


@pytest.fixture(scope="session")
def outcomes(request, daemon, tmp_path_factory):
    """Outcomes of trials. All cases of a module that pytest selected run together."""

    def spawn(module_name, world_size, selected):
        directory = tmp_path_factory.mktemp("trials")
        here = os.path.dirname(__file__)
        ranks = range(world_size)
        error = None
        try:
            run_ranks(
                run_trials,
                world_size,
                here,
                module_name,
                selected,
                str(directory),
                timeout=TIMEOUT_S,
                environment={"OMP_NUM_THREADS": "1"},
            )
        except RankFailed as failed:
            error = f"the ranks died in this trial: {failed}"
        done = [read_outcomes(str(directory), rank) for rank in ranks]
        outcomes = {
            trial: [of[trial] for of in done]
            for trial in selected
            if trial in done[0] and all(trial in of for of in done)
        }
        if error:
            # The other trials run again, without the one that ended the ranks.
            guilty = next((trial for trial in selected if trial not in outcomes), selected[-1])
            lost = "failed", error, 0.0
            outcomes[guilty] = [of.get(guilty, lost) for of in done]
            outcomes[guilty][0] = lost
        return outcomes

    selected = [
        (item.module, item.callspec.params["name"], item.callspec.params["wrapper"])
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ())
    ]
    return Outcomes(selected, spawn)
