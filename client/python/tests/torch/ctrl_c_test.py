"""Ctrl-C in a backward pass on a GPU, whose end PyTorch runs on a thread of its own."""

from models import SMALL_BUCKETS, Mlp
from stand_in_gpu import device_thread, stand_in_gpu
from threads import ctrl_c_after
from trial import WRAPPER, parameters_of, squares, trial
from trial_ranks import trials_test


@trial(WRAPPER)
def ends_the_wait_for_a_verdict(t):
    with stand_in_gpu():
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
    with device_thread():
        for step in range(3):
            t.train(model, squares(t, step), f"step {step}")
        loss = squares(t)(model)
        if t.rank == 1:
            t.meet()
            loss.backward()
            t.meet()
            return
        with t.raises(KeyboardInterrupt), ctrl_c_after(3):
            loss.backward()
        assert all(p.grad is None for p in parameters_of(model))
        t.meet()
        t.meet()
        with t.raises(RuntimeError, match=("step 4", "interrupted")):
            squares(t)(model).backward()


test_ctrl_c = trials_test(__name__)
