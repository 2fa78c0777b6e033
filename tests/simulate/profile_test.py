"""Profiles: every cost has a unit and a source."""

import json

import pytest
from simulate import profile as profiles
from simulate.profile import NETWORKS, PROFILES, Refused, load

# Without them: hooks cost nothing, and an exchange between nodes has one chunk.
_OPTIONAL = ("gradsync.per_tensor", "gradsync.chunk")


@pytest.mark.parametrize("name", profiles.names())
def test_profiles_are_complete(name):
    profile = load(name)
    assert profile.name == name
    for backend in profile.backends:
        assert profile.ring(backend).protocols
    if "gradsync" in profile.backends:
        for key in profiles.KEYS:
            if key.startswith("gradsync.") and key not in _OPTIONAL:
                assert profile.get(key) >= 0
    for model in profile.models:
        compute = profile.compute(model)
        assert 0 < compute.optimizer < compute.step


@pytest.mark.parametrize("name", profiles.names(NETWORKS))
def test_networks_can_be_put_under_any_machine(name):
    network = load(name, NETWORKS)
    assert network.name == name
    for machine in profiles.names():
        merged = load(machine).on_network(network)
        assert merged.backends == load(machine).backends
        assert merged.link == network.link


def test_what_was_measured_here_has_a_date():
    content = json.loads((PROFILES / "this-machine.json").read_text())
    measured = [v for v in content["values"].values() if v["source"].startswith("README.md")]
    assert len(measured) >= 5
    assert sum("date" in value for value in measured) >= 4


def _content(**value):
    entry = {"value": 1, "unit": "us", "source": "a test", **value}
    return {"name": "x", "about": "y", "values": {"nccl.launch": entry}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_content(unit="ms"), "nccl.launch is in us"),
        (_content(source=" "), "no source"),
        (_content(value=-1), "is -1"),
        (_content(value=float("nan")), "is nan"),
        ({"name": "x", "about": "y", "values": {"nccl.lunch": {}}}, "nccl.lunch"),
        ({"name": "x"}, "no profile"),
        ([], "no profile"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=says):
        load(str(path))


def test_a_profile_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(Refused, match="dgx1"):
        load("dgx9")
    with pytest.raises(Refused, match="10gbit"):
        load("10gbyte", NETWORKS)


def test_units_become_seconds_and_bytes():
    paper = load("paper")
    assert paper.get("nccl.launch") == pytest.approx(8.4e-6)
    assert paper.get("compute.resnet50.step") == pytest.approx(0.097)
    assert paper.link == pytest.approx(12.2e9, rel=0.001)
    with pytest.raises(Refused, match="node.steal"):
        paper.get("node.steal")
    with pytest.raises(Refused, match="--compute-ms"):
        paper.compute("bert-base")
