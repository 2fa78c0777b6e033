"""Gradients of a module's parameters as views of a layout's arena."""

from __future__ import annotations

from typing import Any, Sequence

import torch

import gradsync

DATA_TYPES: dict[torch.dtype, gradsync.DataType] = {
    torch.float32: gradsync.DataType.FLOAT32,
    torch.float64: gradsync.DataType.FLOAT64,
    torch.float16: gradsync.DataType.FLOAT16,
    torch.bfloat16: gradsync.DataType.BFLOAT16,
}
# And what else the daemon reduces, but not as gradients.
REDUCED_TYPES: dict[torch.dtype, gradsync.DataType] = {
    **DATA_TYPES,
    torch.int8: gradsync.DataType.INT8,
    torch.uint8: gradsync.DataType.UINT8,
    torch.int16: gradsync.DataType.INT16,
    torch.int32: gradsync.DataType.INT32,
    torch.int64: gradsync.DataType.INT64,
}
_TORCH_DTYPES = {data_type: dtype for dtype, data_type in REDUCED_TYPES.items()}


def flat_tensor(view: gradsync.View, device: torch.device) -> torch.Tensor:
    """A 1-d tensor on the memory of `view`, which it keeps mapped.

    Raises:
      RuntimeError: the memory is on another device than `device`.
    """
    dtype = _TORCH_DTYPES[view.dtype]
    if view.count == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if view.device:
        # The array interface has no bfloat16; its bits come as integers.
        tensor = torch.as_tensor(view, device=device).view(dtype)
        if tensor.data_ptr() != view.address:  # PyTorch has copied it to `device`
            raise RuntimeError(f"gradsync: {view!r} is on {view.device}, which is not {device}")
        return tensor
    return torch.frombuffer(view.buffer, dtype=dtype, count=view.count)


def gradient_tensor(parameter: torch.Tensor, view: gradsync.View) -> torch.Tensor:
    """`view` with the shape of `parameter`, and with its strides if it is dense (channels_last)."""
    flat = flat_tensor(view, parameter.device)
    if is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride())
    return flat.view(parameter.size())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps, in some order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.size()) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


class Slot:
    """One trainable parameter: its place in the layout, and its part in the running backward pass.

    Owned by its wrapper; used on the thread that runs the backward pass.
    """

    __slots__ = (
        "accumulated",
        "bucket",
        "expected",
        "firings",
        "handle",
        "index",
        "name",
        "node",
        "parameter",
        "view",
    )

    def __init__(self, name: str, parameter: torch.nn.Parameter, node: Any) -> None:
        """Args: node: the parameter's AccumulateGrad node, which the slot holds."""
        self.name = name
        self.parameter = parameter
        self.node = node
        self.handle: Any = None
        self.index = -1  # among the layout's parameters
        self.bucket = -1
        self.view: torch.Tensor = torch.empty(0)
        # How often autograd has added to the gradient in this backward pass, and how often it will.
        # The latter is more than 1 only with static_graph.
        self.firings = 0
        self.expected = 1
        # Whether a backward pass under no_sync() has added to it since the last step.
        self.accumulated = False

    def place(self, layout: gradsync.Layout, index: int) -> None:
        """Moves the gradient into `layout`, where it is that of parameter `index`."""
        view = layout.gradient(index)
        old = self.view
        self.index = index
        self.bucket = view.bucket
        self.view = gradient_tensor(self.parameter, view)
        if self.parameter.grad is old:
            self.view.copy_(old)
            self.parameter.grad = self.view

    def bring_home(self) -> None:
        """Copies the parameter's gradient into the view, and makes the view the gradient.

        Raises:
          RuntimeError: the gradient is sparse, or of another dtype or device than the parameter.
        """
        gradient = self.parameter.grad
        view = self.view
        if gradient is view:
            return
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"gradsync: the gradient of parameter '{self.name}' is sparse; gradsync averages "
                "dense gradients: build the module with sparse=False"
            )
        if gradient.dtype is not view.dtype or gradient.device != view.device:
            raise RuntimeError(
                f"gradsync: the gradient of parameter '{self.name}' is {gradient.dtype} on "
                f"{gradient.device}, but {view.dtype} on {view.device} when it was wrapped; wrap "
                "the module again after moving or converting it"
            )
        if gradient.requires_grad or torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                view.copy_(gradient)
        else:
            view.copy_(gradient)
        self.parameter.grad = view


def refuse(name: str, parameter: torch.Tensor) -> str | None:
    """Says why `parameter` cannot be synchronized, and what to do; None if it can."""
    if torch.nn.parameter.is_lazy(parameter):
        return (
            f"parameter '{name}' is not initialized yet; run a forward pass through the lazy "
            "module before wrapping it"
        )
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return (
            f"parameter '{name}' is a DTensor; gradsync synchronizes whole parameters: wrap the "
            "module before sharding it, or do not shard it"
        )
    if parameter.layout is not torch.strided:
        return f"parameter '{name}' is sparse; gradsync synchronizes dense parameters"
    if parameter.is_complex():
        return (
            f"parameter '{name}' is complex; hold it as torch.view_as_real() of it, with a last "
            "dimension of 2"
        )
    if parameter.dtype not in DATA_TYPES:
        return (
            f"parameter '{name}' is {parameter.dtype}; gradsync averages float32, float64, float16 "
            "and bfloat16: convert it, or set requires_grad=False"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        return (
            f"parameter '{name}' is on {parameter.device}; move it to host memory or to a CUDA "
            "device"
        )
    return None


def layout_parameters(slots: Sequence[Slot]) -> list[gradsync.Parameter]:
    """`slots` as parameters for register_layout(), in the same order."""
    return [
        gradsync.Parameter(
            slot.name, tuple(slot.parameter.size()), DATA_TYPES[slot.parameter.dtype]
        )
        for slot in slots
    ]
