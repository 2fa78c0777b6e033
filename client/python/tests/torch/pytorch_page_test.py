"""docs/pytorch-ddp.md names every argument and method of PyTorch's wrapper."""

import inspect
import pathlib
import re

import gradsync.torch
import pytest
from torch.nn.parallel import DistributedDataParallel

PAGE = pathlib.Path(__file__).parents[4] / "docs" / "pytorch-ddp.md"
# What a user or a library can call. The others are steps of PyTorch's forward and backward passes.
_OFFERED = ("_register", "_set_", "_update_process_group", "_get_ddp", "_check_reducer", "_remove_")


def rows(heading):
    """{name: (kind, remark)} of the table under `heading`."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S).group(1)
    table = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]) if len(cells) == 3 else ():
            table[name] = cells[1:]
    return table


def arguments():
    return list(inspect.signature(DistributedDataParallel).parameters)


def methods():
    named = vars(DistributedDataParallel)
    offered = [n for n in named if not n.startswith("_") or n.startswith(_OFFERED)]
    return [n for n in offered if n not in arguments() and not n.startswith("_register_accum")]


def test_every_argument_is_there_and_no_other():
    assert list(rows("Arguments")) == arguments()


def test_every_method_is_there():
    missing = set(methods()) - {"_register_delay_all_reduce_hook"} - rows("Methods").keys()
    assert not missing
    unknown = [n for n in rows("Methods") if not hasattr(DistributedDataParallel, n)]
    assert not unknown


def test_each_is_the_same_or_more_or_refused():
    for name, (kind, remark) in {**rows("Arguments"), **rows("Methods")}.items():
        assert kind in ("same", "more", "no effect", "refused"), name
        assert remark or kind == "same", name


@pytest.mark.parametrize(
    "name", [n for n, (kind, _) in rows("Methods").items() if kind == "refused"]
)
def test_a_method_that_is_said_to_be_refused_is(name):
    assert (
        "Raises: NotImplementedError"
        in getattr(gradsync.torch.DistributedDataParallel, name).__doc__
    )


def test_a_new_argument_would_be_noticed(monkeypatch):
    def constructor(self, module, device_ids=None, new=None):
        pass

    monkeypatch.setattr(DistributedDataParallel, "__init__", constructor)
    with pytest.raises(AssertionError):
        test_every_argument_is_there_and_no_other()
