"""Every difference between two chains is found, and the first one is named."""

import dataclasses

from chain import ChainWriter, Link, first_difference, read_chain

STEPS = 3


def chain():
    return [
        Link(rank, 9, 100 + rank, step, f"0.{step}", f"a{step}", f"o{rank}{step}", f"s{step}")
        for rank in range(2)
        for step in range(1, STEPS + 1)
    ]


def changed(place, **fields):
    links = chain()
    links[place] = dataclasses.replace(links[place], **fields)
    return links


def difference(found, excused=None, repeated=None):
    found = first_difference(chain(), found, excused or {}, repeated or {})
    return None if found is None else (found.rank, found.step, found.what.split()[0])


def test_equal_chains_may_differ_in_processes():
    assert difference(chain()) is None
    assert difference(changed(2, pid=7, incarnation=8)) is None


def test_every_hash_counts():
    for name in ("position", "averages", "own", "state"):
        assert difference(changed(4, **{name: "x"})) == (1, 2, name)


def test_the_first_difference_is_that_of_the_earliest_step():
    links = changed(2, state="x")  # rank 0, step 3
    links[4] = dataclasses.replace(links[4], own="x")  # rank 1, step 2
    assert difference(links) == (1, 2, "own")


def test_the_cause_is_named_before_its_effect():
    assert difference(changed(0, averages="x", state="x")) == (0, 1, "averages")


def test_a_missing_link_is_a_difference_unless_it_is_excused():
    links = chain()
    del links[4]
    assert difference(links) == (1, 2, "is")
    assert difference(links, {1: [2]}) is None
    assert difference(links, {0: [2]}) == (1, 2, "is")


def test_a_step_that_is_done_twice_is_a_difference():
    links = chain()
    assert difference(links + [links[1]]) == (0, 2, "twice,")
    assert difference(links + [links[1]], repeated={0: [2]}) is None
    other = dataclasses.replace(links[1], state="x")
    assert difference(links + [other], repeated={0: [2]}) == (0, 2, "state")


def test_a_step_too_many_is_a_difference():
    links = chain()
    assert difference([*links, dataclasses.replace(links[0], step=9)]) == (0, 9, "the")


def test_written_links_can_be_read(tmp_path):
    for link in chain():
        ChainWriter(tmp_path, link.rank).add(link)
    assert read_chain(tmp_path, 2) == chain()


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    first, second, *_ = chain()
    (tmp_path / "chain-0").write_text(first.line() + second.line()[:-20])
    assert read_chain(tmp_path, 2) == [first]
