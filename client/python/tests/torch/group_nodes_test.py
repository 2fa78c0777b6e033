"""torch.distributed.init_process_group("gradsync") on two nodes: two daemons, and ranks of each."""

import torch
import torch.distributed as dist
from daemon_process import DaemonProcess
from ranks import free_port, run_ranks

# Sub-groups on the first node, on the second, and on both.
LISTS = ([0, 1], [2, 3], [1, 2], [0, 1, 2, 3])


def _is_right(group, ranks, size):
    rank, many = dist.get_rank(), len(ranks)
    tensor = torch.full((size,), float(rank))
    dist.all_reduce(tensor, group=group)
    least = torch.full((size,), rank)
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    part = torch.empty(size // 5)
    dist.reduce_scatter_tensor(part, torch.full((size // 5 * many,), float(rank)), group=group)
    whole = torch.empty(size // 5 * many)
    dist.all_gather_into_tensor(whole, torch.full((size // 5,), float(rank)), group=group)
    return all(
        (
            (tensor == sum(ranks)).all(),
            (least == min(ranks)).all(),
            (part == sum(ranks)).all(),
            torch.equal(whole, torch.tensor(ranks).float().repeat_interleave(size // 5)),
        )
    )


def _reduce_in_groups():
    import gradsync.torch  # noqa: F401  # makes "gradsync" known

    torch.set_num_threads(1)
    dist.init_process_group("gradsync")
    made = [dist.new_group(ranks) for ranks in LISTS]
    right = 0
    for group, ranks in zip([*made, None], [*LISTS, LISTS[-1]]):
        for size in (5, 5, 3_000_000, 3_000_000) if dist.get_rank() in ranks else ():
            right += _is_right(group, ranks, size)
    dist.destroy_process_group()
    return right


def test_groups_of_one_and_of_two_nodes():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    daemons = [
        DaemonProcess(f"--peer_listen={address}", f"--node_name=node-{number}")
        for number, address in enumerate(addresses)
    ]

    def environment(rank):
        return {
            "GRADSYNC_SOCKET": daemons[rank // 2].socket,
            "GRADSYNC_COORDINATOR": addresses[0],
        }

    try:
        # Four times in each group of a rank. Ranks 1 and 2 are in four, the others in three.
        assert run_ranks(_reduce_in_groups, 4, environment=environment) == [12, 16, 16, 12]
    finally:
        for process in daemons:
            process.close()
