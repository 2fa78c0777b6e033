"""torch.distributed.init_process_group("gradsync"): no sum is wrong after an end or a failure."""

import datetime

import torch
import torch.distributed as dist
from ranks import run_ranks

# The time-out of the groups that reach it. To make a group takes less, on a busy machine, too.
SHORT_S = 6


def joined(seconds=300):
    import gradsync.torch  # noqa: F401  # makes "gradsync" known

    torch.set_num_threads(1)
    dist.init_process_group("gradsync", timeout=datetime.timedelta(seconds=seconds))
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


def all_reduced(count, value, group=None):
    """The sum, or the reason of the error and its rank."""
    import gradsync

    tensor = torch.full((count,), float(value))
    try:
        dist.all_reduce(tensor, group=group)
    except gradsync.Error as error:
        return error.reason, error.rank
    return float(tensor[0])


def await_rank_1(rank, store):
    """Rank 0 has the store, and ends last."""
    if rank == 1:
        store.set("done", b"")
    else:
        store.wait(["done"], datetime.timedelta(seconds=60))


def _destroy_early(kind):
    rank, store = joined()
    group = dist.new_group([0, 1]) if kind == "sub-group" else None
    for _ in range(3):
        assert all_reduced(8, rank + 1, group) == 3.0
    if rank == 0:
        dist.destroy_process_group(group)
        store.set("destroyed", b"")
        store.wait(["seen"])
        return None
    store.wait(["destroyed"])
    sums = [all_reduced(8, 2, group), all_reduced(9, 2, group)]
    store.set("seen", b"")
    return sums


def test_a_call_after_another_rank_has_destroyed_its_group_is_refused(daemon):
    for kind in ("default", "sub-group"):
        sums = run_ranks(_destroy_early, 2, kind)[1]
        assert sums == [("RANK_FINISHED", 0)] * 2, kind


# Each waits for rank 0 past the daemon.
OF_GLOO = {
    "barrier": dist.barrier,
    "broadcast": lambda group: dist.broadcast(torch.ones(4), 0, group=group),
    "product": lambda group: dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT, group),
}


def _destroy_before_collectives_of_gloo():
    import gradsync

    rank, store = joined()
    ends = {}
    for name, collective in OF_GLOO.items():
        group = dist.new_group([0, 1])
        collective(group)
        if rank == 0:
            dist.destroy_process_group(group)
            store.set(name, b"")
            continue
        store.wait([name])
        try:
            collective(group)
        except gradsync.Error as error:
            ends[name] = error.reason, error.rank
    await_rank_1(rank, store)
    return ends


def test_collectives_of_gloo_name_the_rank_that_has_destroyed_its_group(daemon):
    ends = run_ranks(_destroy_before_collectives_of_gloo, 2)[1]
    assert ends == dict.fromkeys(OF_GLOO, ("RANK_FINISHED", 0))


def _destroy_together():
    rank, store = joined()
    sums = []
    for _ in range(3):
        pair = dist.new_group([0, 1])
        sums.append(all_reduced(8, rank + 1))
        sums.append(all_reduced(8, rank + 1, pair))
        root = dist.get_world_size() - 1
        dist.broadcast(torch.ones(4), root)
        # The root of the last broadcast waits for nobody.
        dist.destroy_process_group()
        dist.init_process_group("gradsync", store=store, rank=rank, world_size=2)
    dist.destroy_process_group()
    return sums


def test_all_ranks_can_destroy_and_begin_again(daemon):
    assert run_ranks(_destroy_together, 2) == [[3.0] * 6] * 2


def _come_late(count, warm_up):
    rank, store = joined(SHORT_S)
    for _ in range(warm_up):
        assert all_reduced(count, 1) == 2.0
    if rank == 1:
        store.wait(["late"], datetime.timedelta(seconds=60))
    sums = [all_reduced(count, (rank + 1) * 10**index) for index in range(6)]
    if rank == 0:
        store.set("late", b"")
    await_rank_1(rank, store)
    return sums


def test_after_a_time_out_no_call_has_a_result(daemon):
    """In a slot of four, in one of several buckets, and in the staging memory."""
    for count, warm_up in ((8, 9), (2 << 20, 4), (8, 0)):
        early, late = run_ranks(_come_late, 2, count, warm_up)
        reason = "STEP_TIMEOUT" if warm_up else "OPERATION_TIMEOUT"
        assert early == [(reason, early[0][1])] * 6, early
        assert not any(isinstance(each, float) for each in late), late
        assert late[0][0] in (reason, "RANK_LOST") and set(late) == {late[0]}, late


def _interrupt():
    import gradsync

    rank, store = joined()
    for _ in range(3):
        assert all_reduced(2 << 20, 1) == 2.0
    if rank == 0:
        finish_step = gradsync.Layout.finish_step

        def interrupted(*_):
            raise KeyboardInterrupt

        gradsync.Layout.finish_step = interrupted
        try:
            all_reduced(2 << 20, 1)
        except KeyboardInterrupt:
            pass
        gradsync.Layout.finish_step = finish_step
    sums = [all_reduced(2 << 20, 1), all_reduced(8, 1)]
    await_rank_1(rank, store)
    return sums


def test_ctrl_c_amid_an_all_reduce_ends_the_group(daemon):
    interrupted, other = run_ranks(_interrupt, 2)
    assert interrupted == [("CLOSED", None)] * 2
    assert other == [("RANK_LOST", 0)] * 2


def _lack_memory():
    import gradsync

    rank, store = joined()
    assert all_reduced(8, 1) == 2.0
    if rank == 1:

        def refuse(*_, **__):
            raise gradsync.ResourceExhaustedError("no", reason=gradsync.Reason.MEMORY)

        gradsync.Session.register_layout = refuse
    sums = [all_reduced(8, 1), all_reduced(8, 1)]
    await_rank_1(rank, store)
    return sums


def test_a_rank_without_memory_ends_the_group(daemon):
    other, lacking = run_ranks(_lack_memory, 2)
    assert lacking == [("MEMORY", None)] * 2
    assert other == [("RANK_LOST", 1)] * 2
