"""torch.distributed.init_process_group("gradsync"): its collectives do as Gloo's."""

import copy

import torch
import torch.distributed as dist
from models import Mlp
from torch import nn
from trial import GROUP, close, squares, trial
from trial_ranks import trials_test

# Sizes of every path: a slot of one bucket, of several, and one that does not divide.
SIZES = (1, 7, 1000, 600_001)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


def groups(t):
    """The trial's group, and Gloo with the same ranks."""
    t.process_group()
    return dist.group.WORLD, dist.new_group(backend="gloo")


def average(tensor):
    return tensor.double().div(dist.get_world_size()).to(tensor.dtype)


def all_reduced(tensor, op, group, asynchronous):
    work = dist.all_reduce(tensor, op=op, group=group, async_op=asynchronous)
    if asynchronous:
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    else:
        assert work is None
    return tensor


@trial(GROUP)
def all_reduce_is_gloos(t):
    """Two ranks: the same bits, also where both paths of a tensor's first occurrences are new."""
    ours, gloo = groups(t)
    for dtype in FLOATS:
        for size in SIZES:
            for repeat in range(6):
                tensor = t.randn(size, seed=repeat, dtype=dtype)
                expected = tensor.clone()
                dist.all_reduce(expected, group=gloo)
                case = f"{dtype}, {size} elements, repeat {repeat}"
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                    for asynchronous in (False, True):
                        got = all_reduced(tensor.clone(), op, ours, asynchronous)
                        wanted = expected if op == dist.ReduceOp.SUM else average(expected)
                        assert torch.equal(got, wanted), f"{case}, {op}, async {asynchronous}"


@trial(GROUP)
def host_tensors_of_a_group_with_nccl_go_through_the_daemon(t):
    """PyTorch makes its NCCL group when the first tensor on a GPU comes: never, here."""
    t.process_group("cpu:gradsync,cuda:nccl")
    got = torch.full((1000,), t.rank + 1, dtype=torch.int16)  # Gloo has no int16
    for _ in range(2):
        dist.all_reduce(got)
    assert torch.equal(got, torch.full_like(got, 6))


@trial(GROUP, world_size=3)
def three_ranks_add_in_rank_order(t):
    ours, _ = groups(t)
    for repeat in range(4):
        tensor = t.randn(1000, seed=repeat)
        parts = t.gather(tensor)
        dist.all_reduce(tensor, group=ours)
        assert torch.equal(tensor, parts[0] + parts[1] + parts[2])


@trial(GROUP)
def plain_ddp_has_gloos_bits(t):
    """PyTorch's wrapper, unchanged: two ranks end with the same bits on either group."""
    trained = []
    for group in groups(t):
        torch.manual_seed(3)
        model = nn.parallel.DistributedDataParallel(Mlp(), process_group=group, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            squares(t, step)(model).backward()
            optimizer.step()
        trained.append(copy.deepcopy(list(model.parameters())))
    for one, other in zip(*trained):
        assert torch.equal(one, other)
    t.same_bits(trained[0])


OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def result_or_error(tensor, op, group):
    try:
        dist.all_reduce(tensor, op=op, group=group)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return tensor


@trial(GROUP)
def every_operation_is_gloos(t):
    """Also where Gloo refuses. The average of integers is NCCL's."""
    ours, gloo = groups(t)
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for name in OPERATIONS:
            op = getattr(dist.ReduceOp, name)
            tensor = torch.tensor([t.rank + 2, 5, t.rank]).to(dtype)
            got = result_or_error(tensor.clone(), op, ours)
            case = f"{dtype}, {name}: {got}"
            if name == "AVG" and dtype in INTEGERS:
                assert got.tolist() == [2, 5, 0], case
                continue
            if name == "AVG" and dtype is torch.bool:
                assert isinstance(got, str), case  # after it Gloo refuses everything
                continue
            wanted = result_or_error(tensor, op, gloo)
            if isinstance(wanted, str):
                assert got == wanted, case
            else:
                assert torch.equal(got, wanted), f"{case}, Gloo: {wanted}"


@trial(GROUP)
def minima_maxima_and_integers_go_through_the_daemon(t):
    """Each is Gloo's in all its steps: staging memory first, then slots, of every size."""
    ours, gloo = groups(t)
    session = ours._membership.session
    for dtype in (*FLOATS, *INTEGERS):
        for name in ("MIN", "MAX", "SUM"):
            op = getattr(dist.ReduceOp, name)
            for size in SIZES:
                for repeat in range(3):
                    # Sums of uint8 and int8 wrap around.
                    tensor = (100 * t.randn(size, seed=repeat)).to(torch.int64).to(dtype)
                    expected = tensor.clone()
                    dist.all_reduce(expected, op=op, group=gloo)
                    work = dist.all_reduce(tensor, op=op, group=ours, async_op=True)
                    assert type(work).__name__ == "ReductionWork", f"{dtype} {name} is Gloo's"
                    work.wait()
                    assert torch.equal(tensor, expected), f"{dtype}, {name}, {size}, {repeat}"
    assert session is ours._membership.session


@trial(GROUP, world_size=3)
def a_nan_of_any_rank_is_the_minimum_and_the_maximum(t):
    """With Gloo that depends on the rank."""
    ours, _ = groups(t)
    for dtype in FLOATS:
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for repeat in range(3):
                tensor = torch.arange(40, dtype=dtype)
                tensor[t.rank] = torch.nan
                dist.all_reduce(tensor, op=op, group=ours)
                assert tensor[:3].isnan().all(), f"{dtype}, {op}, repeat {repeat}: {tensor}"
                assert tensor[3:].tolist() == list(range(3, 40))


@trial(GROUP)
def int16_which_gloo_refuses(t):
    ours, _ = groups(t)
    for _ in range(3):
        tensor = torch.tensor([1 if t.rank else 32767, -5], dtype=torch.int16)
        dist.all_reduce(tensor, group=ours)
        assert tensor.tolist() == [-32768, -10]


@trial(GROUP, world_size=3)
def gathered_and_scattered_as_with_gloo(t):
    """Tensors of every type, also those that the daemon does not reduce, and in sub-groups."""
    t.process_group()
    for ranks in ([0, 1, 2], [0, 2]):
        ours, gloo = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        if t.rank not in ranks:
            continue
        many = len(ranks)
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            for size in (1, 5, 1000, 800_001):
                for repeat in range(3):
                    part = (10 * t.randn(size, seed=repeat)).to(dtype)
                    whole, expected = (torch.zeros(many * size, dtype=dtype) for _ in range(2))
                    work = dist.all_gather_into_tensor(whole, part, ours, async_op=True)
                    work.wait()
                    dist.all_gather_into_tensor(expected, part, group=gloo)
                    case = f"{dtype}, {size} elements, repeat {repeat}, ranks {ranks}"
                    large = whole.nbytes >= 8 << 20
                    assert (type(work).__name__ == "ReductionWork") == large, case
                    assert torch.equal(whole, expected), f"all-gather, {case}"
        for dtype in (torch.float32, torch.float64, *INTEGERS):
            for size in (1, 5, 1000, 800_001):
                for repeat, name in enumerate(("SUM", "MIN", "MAX", "SUM", "MIN", "MAX")):
                    op = getattr(dist.ReduceOp, name)
                    # Whole numbers: their sums are exact in any order.
                    whole = (10 * t.randn(many * size, seed=repeat)).to(torch.int64).to(dtype)
                    before = whole.clone()
                    part, expected = (torch.zeros(size, dtype=dtype) for _ in range(2))
                    work = dist.reduce_scatter_tensor(part, whole, op, ours, async_op=True)
                    work.wait()
                    large = many > 2 or whole.nbytes >= 4 << 20
                    assert (type(work).__name__ == "ReductionWork") == large, f"{dtype} {name}"
                    assert torch.equal(whole, before), "the input was written"
                    dist.reduce_scatter_tensor(expected, whole, op=op, group=gloo)
                    case = f"{dtype}, {name}, {size} elements, repeat {repeat}, ranks {ranks}"
                    assert torch.equal(part, expected), f"reduce-scatter, {case}"


@trial(GROUP)
def gathered_and_scattered_in_every_way(t):
    """Strides, shapes, aliases, averages, many at once, futures, and what Gloo refuses."""
    ours, gloo = groups(t)
    from gradsync.torch.process_group import _group

    least = _group.LEAST_GATHERED_BYTES, _group.LEAST_SCATTERED_BYTES
    _group.LEAST_GATHERED_BYTES = _group.LEAST_SCATTERED_BYTES = 0
    try:
        gathered_and_scattered(t, ours, gloo)
    finally:
        _group.LEAST_GATHERED_BYTES, _group.LEAST_SCATTERED_BYTES = least


def gathered_and_scattered(t, ours, gloo):
    for repeat in range(3):
        # The input is a part of the output, as in fully_shard.
        whole = torch.full((2, 3), -1.0)
        whole[t.rank] = t.rank + repeat
        dist.all_gather_into_tensor(whole.view(-1), whole[t.rank], group=ours)
        assert whole.tolist() == [[repeat] * 3, [repeat + 1] * 3]
        strided = torch.zeros(8, 2).t()
        dist.all_gather_into_tensor(strided, torch.full((1, 8), t.rank + 1.0), group=ours)
        assert strided.tolist() == [[1.0] * 8, [2.0] * 8]
        part = torch.zeros(3, 4)[:, ::2]
        dist.reduce_scatter_tensor(part, torch.ones(2, 6).t(), dist.ReduceOp.AVG, group=ours)
        assert (part == 1).all()
        works = []
        for number in range(9):
            outputs = torch.zeros(2 * 400), torch.zeros(200)
            one = torch.full((400,), float(t.rank + number))
            works.append(dist.all_gather_into_tensor(outputs[0], one, ours, True))
            works.append(dist.reduce_scatter_tensor(outputs[1], one, group=ours, async_op=True))
            works[-1].get_future().then(lambda future: future.value())
        for work in works[::-1]:
            work.wait()
        assert outputs[0].tolist() == [8] * 400 + [9] * 400
        assert outputs[1].tolist() == [17] * 200
    for group in (ours, gloo):
        for call in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
            try:
                call(torch.zeros(3), torch.zeros(4), group=group)
            except (RuntimeError, ValueError):
                continue
            raise AssertionError(f"{call.__name__} takes tensors that do not fit")


@trial(GROUP)
def negative_integers_are_averaged_towards_zero(t):
    ours, _ = groups(t)
    tensor = torch.tensor([-3, 3]) if t.rank else torch.tensor([0, 0])
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=ours)
    assert tensor.tolist() == [-1, 1]


STRIDED = {
    "columns": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "expanded from a row": lambda x: x[:1].t(),
    "channels last": lambda x: x.reshape(1, 2, 2, -1).to(memory_format=torch.channels_last),
}


@trial(GROUP)
def strides_do_not_matter(t):
    """Gloo gives wrong values here; the reference is a contiguous copy."""
    ours, gloo = groups(t)
    for name, view in STRIDED.items():
        for repeat in range(3):
            for dtype in (torch.float32, torch.int64):
                whole = (10 * t.randn(4, 6, seed=repeat)).to(dtype)
                before = whole.clone()
                tensor = view(whole)
                expected = tensor.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(expected, group=gloo)
                dist.all_reduce(tensor, group=ours)
                assert torch.equal(tensor, expected), f"{name}, {dtype}, repeat {repeat}"
                if name == "columns":
                    assert torch.equal(whole[:, 1::2], before[:, 1::2]), "the gaps were written"
        output = view(torch.zeros(4, 6))
        parts = [view(torch.full((4, 6), float(part))) for part in range(2)]
        dist.scatter(output, parts if t.rank == 0 else None, group=ours)
        assert torch.equal(output, parts[t.rank]), f"scatter, {name}"
        dist.reduce_scatter(output, parts, group=ours)
        assert torch.equal(output, 2 * parts[t.rank]), f"reduce_scatter, {name}"
        dist.reduce(tensor := view(torch.ones(4, 6)), 0, group=ours)
        assert t.rank != 0 or (tensor == 2).all(), f"reduce, {name}"


@trial(GROUP)
def many_at_once_waited_for_in_any_order(t):
    """More than a size has slots, of several sizes, between collectives of Gloo."""
    ours, _ = groups(t)
    for repeat in range(3):
        works = []
        for number in range(12):
            size = (10, 3000, 2_000_000)[number % 3]
            tensor = torch.full((size,), float(t.rank + number))
            works.append((dist.all_reduce(tensor, group=ours, async_op=True), tensor, number))
            if number == 5:
                dist.barrier(ours)
        for work, tensor, number in works[::-1] if repeat else works:
            work.wait()
            assert (tensor == 2 * number + 1).all(), number


@trial(GROUP)
def beginning_waits_for_nobody(t):
    """Rank 1 begins its all-reduces only when it has a message that rank 0 sends after its own."""
    ours, _ = groups(t)
    tensors = [torch.ones(size) for size in (10, 10, 10, 3_000_000, 3_000_000, 3_000_000)]
    message = torch.zeros(1)
    if t.rank == 1:
        dist.recv(message, 0)
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    if t.rank == 0:
        dist.send(message, 1)
    for work, tensor in zip(works, tensors):
        work.wait()
        assert (tensor == 2).all()


@trial(GROUP)
def futures(t):
    """Callbacks see the result, and may wait for other all-reduces, begun before or after."""
    ours, _ = groups(t)

    def begin(value):
        tensor = torch.full((100,), value + t.rank)
        return dist.all_reduce(tensor, group=ours, async_op=True)

    for _ in range(3):
        later = [begin(20.0)]

        def nested(future, later=later):
            (first,) = future.value()
            (second,) = begin(10.0).get_future().wait()
            (third,) = later[0].get_future().wait()
            return float(first[0] + second[0] + third[0])

        work = begin(0.0)
        assert work.get_future() is work.get_future()
        chained = work.get_future().then(nested)
        assert chained.wait() == 1 + 21 + 41
        assert work.is_completed()
    gathered = torch.zeros(2)
    one = dist.all_gather_into_tensor(gathered, torch.full((1,), float(t.rank)), ours, True)
    one.get_future().wait()
    assert gathered.tolist() == [0, 1]


@trial(GROUP)
def groups_in_another_order_on_each_rank(t):
    """Each group keeps its order. Between groups there is none, as with Gloo."""
    t.process_group()
    ours = [dist.new_group() for _ in range(3)]
    # Sizes that need threads: without slots, with more all-reduces than slots, with a queue.
    for size in (10, 10, 2 << 20, 2 << 20):
        tensors = [torch.full((3, size), float(t.rank + place)) for place in range(len(ours))]
        futures = []
        for place in range(len(ours))[:: 1 if t.rank == 0 else -1]:
            for part in tensors[place]:
                work = dist.all_reduce(part, group=ours[place], async_op=True)
                futures.append(work.get_future())
        for future in futures:
            future.wait()
        for place, tensor in enumerate(tensors):
            assert (tensor == 1 + 2 * place).all()


@trial(GROUP)
def several_tensors_in_one_call(t):
    ours, _ = groups(t)
    for _ in range(3):
        tensors = [torch.ones(5), torch.full((4, 3), 2.0), torch.ones(2)]
        with dist._coalescing_manager(group=ours):
            for tensor in tensors[:2]:
                dist.all_reduce(tensor, group=ours)
        dist.all_reduce_coalesced(tensors, group=ours)
        assert [float(tensor.flatten()[0]) for tensor in tensors] == [4, 8, 2]
        with dist._coalescing_manager(group=ours, async_ops=True) as manager:
            dist.all_reduce(tensors[0], op=dist.ReduceOp.AVG, group=ours)
        manager.wait()
        assert float(tensors[0][0]) == 4


@trial(GROUP, world_size=3)
def sub_groups(t):
    """Each is a job of its own; ranks are in some, and all-reduce in them in any order."""
    t.process_group()
    lists = [[0, 1], [1, 2], [0, 2], [0, 1, 2], [1]]
    made = [dist.new_group(ranks) for ranks in lists]
    for repeat in range(3):
        for group, ranks in list(zip(made, lists))[:: 1 if repeat % 2 else -1]:
            if t.rank not in ranks:
                continue
            tensor = torch.full((50,), float(t.rank))
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(ranks)).all(), ranks
    dist.destroy_process_group(made[3])
    for group, ranks in zip(made[:3], lists):
        if t.rank in ranks:
            dist.all_reduce(torch.ones(2), group=group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3]


@trial(GROUP)
def sizes_beyond_the_groups_memory(t):
    """Sizes that come late have no slot, and are reduced all the same."""
    from unittest import mock

    from gradsync.torch.process_group import _slots

    with mock.patch.object(_slots, "MOST_SLOTS", 2), mock.patch.object(_slots, "_SEEN_KEYS", 3):
        ours, _ = groups(t)
        for repeat in range(3):
            for size in range(1, 7):
                tensor = torch.full((size,), float(repeat))
                dist.all_reduce(tensor, group=ours)
                assert (tensor == 2 * repeat).all()


@trial(GROUP)
def sizes_that_come_no_more_make_way(t):
    """More sizes than a session may have layouts."""
    from unittest import mock

    from gradsync.torch.process_group import _slots

    with mock.patch.object(_slots, "MOST_SLOTS", 5), mock.patch.object(_slots, "IDLE_USES", 3):
        ours, _ = groups(t)
        late = []
        for size in range(1, 80):
            for repeat in range(3):
                tensor = torch.full((size,), float(repeat))
                work = dist.all_reduce(tensor, group=ours, async_op=True)
                late.append((work, tensor, repeat))
            for work, tensor, repeat in late[:-4]:  # the last ones are under way
                work.wait()
                assert (tensor == 2 * repeat).all()
            del late[:-4]
        slots = ours._reductions._slots._slots.values()
        assert len(slots) == 5
        assert not any(slot._refused for slot in slots)


@trial(GROUP)
def every_collective_is_overridden(t):
    """C++ would call an inherited one with the GIL held; see ForwardedCollectives."""
    from gradsync.torch.process_group import ProcessGroup

    # Neither moves data between ranks.
    harmless = {
        "_device_types",
        "_enable_collectives_timing",
        "_end_coalescing",
        "_get_backend",
        "_get_backend_name",
        "_get_sequence_number_for_group",
        "_has_hooks",
        "_backend_id",
        "_id",
        "_register_backend",
        "_register_on_completion_hook",
        "_set_default_backend",
        "_set_group_desc",
        "_set_group_name",
        "_set_sequence_number_for_group",
        "_start_coalescing",
        "_wait_for_pending_works",
        "bound_device_id",
        "boxed",
        "get_group_store",
        "group_desc",
        "group_name",
        "name",
        "rank",
        "set_timeout",
        "size",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
        "BackendType",
        *(name for name in dir(dist.ProcessGroup) if name.isupper()),
    }
    inherited = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("__")
        and not name.startswith("_pybind11")
        and getattr(ProcessGroup, name) is getattr(dist.ProcessGroup, name)
    }
    assert inherited <= harmless, inherited - harmless


@trial(GROUP)
def one_word(t):
    """The group's name, and options that it refuses."""
    ours, _ = groups(t)
    assert dist.get_backend() == "gradsync" and ours.name() == "gradsync"
    with t.raises(TypeError, match="pg_options"):
        dist.new_group(backend="gradsync", pg_options=object())
    with t.raises(NotImplementedError, match="new_group"):
        ours.split_group([0])


@trial(GROUP)
def destroying_gives_the_memory_back(t):
    """A group's slots are memory of the daemon that this process has mapped."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("gradsync" in line for line in maps if "memfd" in line)

    before = mapped()
    t.process_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    assert mapped() > before
    dist.destroy_process_group()
    assert mapped() == before


@trial(GROUP)
def destroy_and_init_again(t):
    for repeat in range(3):
        t.process_group()
        tensor = torch.ones(3) * (t.rank + repeat)
        dist.all_reduce(tensor)
        close(tensor, torch.full((3,), 2.0 * repeat + 1))
        dist.destroy_process_group()


test = trials_test(__name__)
