"""Checks that a module can be wrapped, and that it has not changed since."""

from __future__ import annotations

from typing import NoReturn, Sequence

import torch

from gradsync.torch._gradients import Slot, refuse


def check_module(module: torch.nn.Module) -> None:
    """Checks that everything in `module` can be synchronized, and that no part is wrapped already.

    Raises:
      TypeError: a part cannot be synchronized; says which, why, and what to do.
      ValueError: the module has no parameter to synchronize.
    """
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True and isinstance(
            submodule, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise TypeError(
                f"gradsync: module '{name}' makes sparse gradients, and gradsync averages dense "
                "ones; build it with sparse=False"
            )
        if isinstance(submodule, torch.nn.SyncBatchNorm) and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            raise TypeError(
                f"gradsync: module '{name}' is a SyncBatchNorm, which needs a torch.distributed "
                "process group of its own; initialize one, or use BatchNorm"
            )
        if isinstance(submodule, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"gradsync: module '{name}' is wrapped already; wrap the whole module once, or its "
                "parts one by one"
            )
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    trainable = [(name, p) for name, p in trainable if name not in ignored]
    if not trainable:
        raise ValueError(
            "gradsync: the module has no parameter that requires a gradient, so there is nothing "
            "to synchronize; do not wrap it"
        )
    for name, parameter in trainable:
        why = refuse(name, parameter)
        if why is not None:
            raise TypeError(f"gradsync: {why}")
    first_name, first = trainable[0]
    for name, parameter in trainable:
        if parameter.device != first.device:
            raise TypeError(
                f"gradsync: parameter '{name}' is on {parameter.device}, but '{first_name}' on "
                f"{first.device}; wrap the parts on each device separately"
            )


def check_not_wrapped_again(name: str, slots: Sequence[Slot]) -> None:
    """Checks, in a forward pass, that PyTorch's wrapper does not average the same gradients.

    Args:
      name: the layout's.
      slots: the module's parameters.

    Raises:
      TypeError: it does.
    """
    # The class has this attribute while a forward pass of one of its modules runs.
    outer = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if outer is None:
        return
    theirs = {id(parameter) for parameter in outer._module_parameters}
    for slot in slots:
        if id(slot.parameter) in theirs:
            raise TypeError(
                f"gradsync: parameter '{slot.name}' of '{name}' is averaged here already, and "
                "PyTorch's DistributedDataParallel around this module would do it again; wrap the "
                "module once: by gradsync.torch.DistributedDataParallel, or by PyTorch's with "
                "gradsync.torch.allreduce_hook"
            )


def check_device_verdict(device: torch.device, buffers: Sequence[str]) -> None:
    """Checks that the verdicts of steps on `device` can stay there.

    Args:
      device: the gradients' device.
      buffers: names of the buffers that each step broadcasts.

    Raises:
      ValueError: they cannot; says why and what to do.
    """
    if device.type != "cuda":
        raise ValueError(
            f"gradsync: device_verdict needs a module on a GPU, and this one is on {device}; wrap "
            "it without device_verdict"
        )
    if buffers:
        raise ValueError(
            f"gradsync: with device_verdict the host does not wait for steps, but buffer "
            f"'{buffers[0]}' is broadcast through the host after each step; pass "
            "broadcast_buffers=False"
        )


class Identity:
    """The parameters and submodules of a module when it was wrapped, to compare with later.

    A check reads the module's dictionaries, not `named_parameters()`. It runs before each forward
    pass and takes about 50 ns for each parameter or submodule.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Records the parts of `module`."""
        self._root = module
        self._look()

    def _look(self) -> None:
        """Records every place that holds a parameter or submodule."""
        self._parameters = []
        self._modules = []
        self._sizes = []
        for prefix, submodule in self._root.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for entries in (submodule._parameters, submodule._modules):
                self._sizes.append((entries, len(entries)))
            for key, child in submodule._modules.items():
                self._modules.append((submodule._modules, key, child))
            for key, parameter in submodule._parameters.items():
                if parameter is not None:
                    self._parameters.append(
                        (
                            submodule._parameters,
                            key,
                            parameter,
                            parameter.dtype,
                            parameter.requires_grad,
                            dot + key,
                        )
                    )

    def check(self) -> None:
        """Raises: RuntimeError: names the first parameter that was replaced or changed."""
        for parameters, key, parameter, dtype, requires_grad, name in self._parameters:
            if key not in parameters or parameters[key] is not parameter:
                _refuse(name, "is not the one that was wrapped (load_state_dict(assign=True)?)")
            if parameter.dtype is not dtype:
                _refuse(name, f"was converted from {dtype} to {parameter.dtype}")
            if not requires_grad and parameter.requires_grad:
                _refuse(name, "did not require a gradient when it was wrapped, and now does")
        for entries, size in self._sizes:
            if len(entries) != size:
                self._look_again()
                return
        for modules, key, child in self._modules:
            if key not in modules or modules[key] is not child:
                self._look_again()
                return

    def _look_again(self) -> None:
        """Submodules have changed. That is allowed if they hold the same parameters."""
        known = {id(parameter) for _, _, parameter, _, _, _ in self._parameters}
        now = dict(self._root.named_parameters())
        for name, parameter in now.items():
            if id(parameter) not in known:
                _refuse(name, "was not there when the module was wrapped")
        there = {id(parameter) for parameter in now.values()}
        for _, _, parameter, _, _, name in self._parameters:
            if id(parameter) not in there:
                _refuse(name, "is not in the module any more")
        self._look()


def _refuse(name: str, what: str) -> NoReturn:
    raise RuntimeError(
        f"gradsync: parameter '{name}' {what}, so its gradients would not be synchronized; wrap "
        "the module again"
    )
