import gradsync
from ranks import run_ranks


def one_step():
    with gradsync.Session.join() as session:
        layout = session.register_layout(explicit_buckets=[gradsync.Bucket(10)])
        bucket = layout.bucket(0).numpy()
        bucket[:] = session.rank
        step = layout.next_step
        layout.mark_ready(step, 0)
        layout.end_step(step)
        return layout.wait_step(step), float(bucket[0])


def test_a_step(daemon):
    (first, mine), (second, theirs) = run_ranks(one_step, 2)
    assert mine == theirs == 0.5
    assert first == second and first.buckets == second.buckets
