"""Where PyTorch lets a wrapper look into a backward pass, over the releases from 1.13 on."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Iterable

import torch

# Whether gradients are seen by `Tensor.register_post_accumulate_grad_hook` (PyTorch 2.1 and later)
# or by a hook of the parameter's AccumulateGrad node. Read when a module is wrapped.
POST_ACCUMULATE: bool = hasattr(
    torch.Tensor, "register_post_accumulate_grad_hook"
) and not os.environ.get("GRADSYNC_TORCH_ACCUMULATE_GRAD_HOOKS")

_current_graph_task_id: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
_will_engine_execute_node: Callable[[Any], bool] | None = getattr(
    torch._C, "_will_engine_execute_node", None
)


def accumulate_node(parameter: torch.Tensor) -> Any:
    """The autograd node that adds to `parameter.grad`.

    Whoever wants to meet the same node again must keep it: a parameter refers to it weakly.
    """
    with torch.enable_grad():
        alias = parameter.view_as(parameter)
    assert alias.grad_fn is not None
    return alias.grad_fn.next_functions[0][0]


def on_accumulated(parameter: Any, node: Any, call: Callable[[], None]) -> Any:
    """Calls `call` each time autograd has added to `parameter.grad`, on the backward's thread.

    Returns a handle; its `remove()` ends it.
    """
    if POST_ACCUMULATE:
        return parameter.register_post_accumulate_grad_hook(lambda _: call())
    return node.register_hook(lambda *_: call())


def backward_id() -> int | None:
    """A number of the backward pass that runs on this thread; None if there is none.

    Before PyTorch 2.0, which does not tell, always None.
    """
    if _current_graph_task_id is None:
        return None
    number = _current_graph_task_id()
    return None if number < 0 else number


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call` when the backward pass that runs on this thread has finished.

    An exception in the pass drops it; an exception that it raises is raised by `backward()`.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def reaches_gradients(output_node: Any, nodes: Iterable[Any]) -> bool:
    """Whether the running pass is a backward that adds to gradients, seen from a module's output.

    `torch.autograd.grad` runs the same graph, hooks of outputs included, and adds to nothing.

    Args:
      output_node: the `grad_fn` of the output whose hook asks.
      nodes: the AccumulateGrad nodes of the module's parameters, the likeliest to be used first.
    """
    if _will_engine_execute_node is None:
        return True
    known = []
    for node in nodes:
        try:
            if _will_engine_execute_node(node):
                return True
        except RuntimeError:
            return False  # autograd.grad asks for this very parameter's gradient
        known.append(node)
    # None of them. Either the pass wants other gradients, or they are used inside of reentrant
    # checkpoints, or not at all: where they can be reached from here and still are not run, it is
    # the first.
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


def keep_from_compiling(owner: type, method: str) -> None:
    """Keeps torch.compile out of `owner.method` itself, not out of what it calls.

    Does so once PyTorch's compiler is loaded, which takes seconds, and not before.
    """
    compiler = sys.modules.get("torch._dynamo")
    function = getattr(owner, method)
    if compiler is not None and not getattr(function, "_torchdynamo_disable", False):
        setattr(owner, method, compiler.disable(function, recursive=False))
