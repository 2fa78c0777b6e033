"""Where PyTorch lets a wrapper look into a backward pass, over the releases from 1.13 on."""

from __future__ import annotations

import os
import sys
import weakref
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


def in_backward() -> bool:
    """Whether a backward pass runs on this thread."""
    if _current_graph_task_id is not None:
        return _current_graph_task_id() >= 0
    try:
        at_end_of_backward(_nothing)
    except RuntimeError:  # only a backward pass takes callbacks
        return False
    return True


def _nothing() -> None:
    pass


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


class _Forward:
    """One forward pass. Its outputs' hooks hold it: it lives as long as its graph does."""

    __slots__ = ("__weakref__", "begin", "seen", "synchronize")

    def __init__(self, synchronize: bool, begin: Callable[[Any, bool], bool]) -> None:
        self.synchronize = synchronize
        self.begin = begin
        self.seen = False  # a backward pass came through it


class _OutputHook:
    """A tensor hook; holds the tensor's node, because the tensor must not be kept alive."""

    __slots__ = ("forward", "forwards", "node")

    def __init__(self, forwards: Forwards, forward: _Forward, node: Any) -> None:
        self.forwards = forwards
        self.forward = forward
        self.node = node

    def __call__(self, gradient: torch.Tensor) -> None:
        if self.forward.begin(self.node, self.forward.synchronize):
            self.forward.seen = True
            if not self.forward.synchronize:
                self.forwards.enter_local_pass()


class Forwards:
    """Forward passes of one module, and which of them a gradient comes from.

    A backward pass announces itself at an output, before the first gradient. Where it does not (the
    outputs hide their tensors, or the loss is made of torch.autograd.grad's results, whose graph no
    output lies on), the forward passes that are still waiting for theirs have to tell.
    """

    def __init__(self) -> None:
        """No pass yet."""
        # The last backward pass that came through a no_sync() forward; before PyTorch 2.0, which
        # does not number them, whether the one that runs does.
        self._local_pass: int | bool | None = None
        self._alive: list[weakref.ref[_Forward]] = []
        # Of forward passes without a tensor to hook; whether they are still waiting nobody knows.
        self._hidden: list[bool] = []

    def add(
        self, synchronize: bool, outputs: Iterable[Any], begin: Callable[[Any, bool], bool]
    ) -> None:
        """A forward pass gave `outputs`; a backward pass through one calls `begin(node, ...)`."""
        if self._local_pass is True and not in_backward():  # it has died
            self._local_pass = None
        forward = _Forward(synchronize, begin)
        found = False
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(_OutputHook(self, forward, tensor.grad_fn))
                found = True
        if found:
            self._alive = [ref for ref in self._alive if ref() is not None]
            self._alive.append(weakref.ref(forward))
        else:
            # As many as one backward pass may go through, and no endless list of logging passes.
            self._hidden = [*self._hidden[-7:], synchronize]

    def unseen_begins(self, backward: int | None, parameter: str) -> bool:
        """Whether a gradient of `parameter` in a pass that no output announced begins a step.

        Raises:
          RuntimeError: it may belong to a forward pass inside of no_sync() or to one outside.
        """
        if self._local_pass is True or (backward is not None and self._local_pass == backward):
            return False
        alive = [forward for ref in self._alive if (forward := ref()) is not None]
        waiting = [forward for forward in alive if not forward.seen]
        kinds = {forward.synchronize for forward in waiting} | set(self._hidden)
        if len(kinds) == 2:
            raise RuntimeError(
                f"gradsync: parameter '{parameter}' got a gradient that passed no output of the "
                "wrapped module, while forward passes inside and outside of no_sync() wait for "
                "theirs: it is not clear whether to synchronize. Let forward() return its tensors "
                "in tuples, lists, dictionaries or data classes, or run one backward pass before "
                "the next forward pass"
            )
        if waiting:
            waiting[0].seen = True
        else:
            self._hidden.clear()
        if kinds != {True}:
            self.enter_local_pass()
            return False
        return True

    def enter_local_pass(self) -> None:
        """The backward pass that runs only accumulates."""
        self._local_pass = backward_id()
        if self._local_pass is None:
            self._local_pass = True
            at_end_of_backward(self._leave_local_pass)

    def _leave_local_pass(self) -> None:
        self._local_pass = None


# Whether optimizers tell of their steps: PyTorch 2.0 and later.
OPTIMIZER_HOOKS: bool = hasattr(torch.optim.Optimizer, "register_step_pre_hook")


def around_optimizer_steps(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Calls `before` and `after` with each optimizer that steps, without OPTIMIZER_HOOKS never.

    A step that raises has no `after`.
    """
    if OPTIMIZER_HOOKS:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)


def keep_from_compiling(owner: type, method: str) -> None:
    """Keeps torch.compile out of `owner.method` itself, not out of what it calls.

    Does so once PyTorch's compiler is loaded, which takes seconds, and not before.
    """
    compiler = sys.modules.get("torch._dynamo")
    function = getattr(owner, method)
    if compiler is not None and not getattr(function, "_torchdynamo_disable", False):
        setattr(owner, method, compiler.disable(function, recursive=False))
