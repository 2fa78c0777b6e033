"""What the package asks autograd about the backward pass that runs."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch


def accumulate_node(parameter: torch.Tensor) -> Any:
    """The autograd node that adds to `parameter.grad`.

    Keep it: a parameter refers to its node weakly, and gets another one when nobody holds it.
    """
    with torch.enable_grad():
        alias = parameter.view_as(parameter)
    assert alias.grad_fn is not None
    return alias.grad_fn.next_functions[0][0]


def backward_id() -> int | None:
    """The number of the backward pass that runs on this thread; None if there is none."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def within_another_backward() -> bool:
    """At the end of a backward pass: whether a node of another backward pass runs it.

    If so, the pass is that of a reentrant checkpoint.
    """
    return torch._C._current_autograd_node() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call` at the end of the backward pass that runs on this thread.

    If the pass raises an exception, `call` is not called. If `call` raises one, `backward()` does.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def reaches_gradients(output_node: Any, nodes: Iterable[Any]) -> bool:
    """Whether the running backward pass adds to gradients of a module's parameters.

    `torch.autograd.grad` runs the same graph, with the hooks of outputs, and adds to none.

    Args:
      output_node: the `grad_fn` of the module's output at which the pass is.
      nodes: the AccumulateGrad nodes of the module's parameters; the most likely ones come first.
    """
    known = []
    for node in nodes:
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:
            return False  # autograd.grad was asked for this parameter's gradient
        known.append(node)
    # The pass runs none of these nodes. If one can be reached from here, autograd.grad was asked
    # for other gradients. Else the parameters are used in reentrant checkpoints, or not at all.
    return not _reachable(output_node, set(known))


def _reachable(start: Any, targets: set[Any]) -> bool:
    seen = {start}
    stack = [start]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            if node in targets:
                return True
            seen.add(node)
            stack.append(node)
    return False
