"""Profiles: every cost has a unit and a source."""

import pytest
from simulate import profile as profiles
from simulate.profile import Refused, load

# Without them: hooks cost nothing, and an exchange between nodes has one chunk.
_OPTIONAL = ("gradsync.per_tensor", "gradsync.chunk")


@pytest.mark.parametrize("name", profiles.names())
def test_profiles_are_complete(name):
    profile = load(name)
    assert profile.name == name
    assert profile.about
    for backend in profile.backends:
        assert profile.ring(backend).protocols
    for key in profiles.KEYS:
        if key.startswith("gradsync.") and key not in _OPTIONAL:
            assert profile.get(key) >= 0


def test_measured_costs_have_a_date():
    values = load("this-machine").values.values()
    here = ("docs/benchmarks.md", "gradsync-bench")
    measured = [value.source for value in values if value.source.startswith(here)]
    assert len(measured) >= 5
    assert all("(2026-" in source for source in measured)


def _costs(line):
    return f"[about]\ntext = y\n[costs]\n{line}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_costs("nccl.launch = 1 ms; a test"), "nccl.launch is in us"),
        (_costs("nccl.launch = 1 us; "), "no source"),
        (_costs("nccl.launch = 1 us"), "no source"),
        (_costs("nccl.launch = -1 us; a test"), "is -1"),
        (_costs("nccl.launch = nan us; a test"), "is nan"),
        (_costs("nccl.launch = one us; a test"), "no profile"),
        (_costs("nccl.lunch = 1 us; a test"), "nccl.lunch"),
        ("[about]\ntext = y\n", "no profile"),
        ("text", "no profile"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "x.ini"
    path.write_text(text)
    with pytest.raises(Refused, match=says):
        load(str(path))


def test_unknown_profile_is_refused_with_the_names_of_the_known():
    with pytest.raises(Refused, match="this-machine"):
        load("dgx9")


def test_units_become_seconds_and_bytes():
    paper = load("paper")
    assert paper.get("nccl.launch") == pytest.approx(8.4e-6)
    assert paper.get("compute.resnet50.step") == pytest.approx(0.097)
    assert paper.link == pytest.approx(12.2e9, rel=0.001)
    with pytest.raises(Refused, match="node.steal"):
        paper.get("node.steal")
    with pytest.raises(Refused, match="--compute-ms"):
        paper.compute("bert-base")
