"""The device_ids and output_device of a wrapper: the module's own device, and nothing else."""

from __future__ import annotations

from typing import Any, Collection, Sequence

import torch
from torch._utils import _get_device_index


def check_devices(
    device_ids: Sequence[Any] | None, output_device: Any, devices: Collection[torch.device]
) -> tuple[list[int] | None, int | None]:
    """Checks the arguments of PyTorch's wrapper that name the module's GPU.

    Args:
      device_ids: None, or a list of one number, device or device's name.
      output_device: None, or the same device.
      devices: those of the module's parameters.

    Returns:
      Both as numbers; inputs are moved to the first. None, None: inputs stay where they are.

    Raises:
      ValueError: the module is elsewhere; says where.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"gradsync: device_ids names {len(device_ids)} devices; start one process for each "
            "device, and pass [the module's own device] or None"
        )
    if not device_ids and output_device is None:
        return None, None
    own = next(iter(devices))
    if not device_ids or len(devices) > 1 or own.type == "cpu":
        places = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(
            "gradsync: device_ids and output_device are for a module on one GPU, and go together; "
            f"got device_ids {device_ids} and output_device {output_device} for a module on "
            f"{places}: leave them out, or move the module to its device first"
        )
    ids = [_get_device_index(device_ids[0], True)]
    output = ids[0] if output_device is None else _get_device_index(output_device, True)
    for name, index in (("device_ids", ids[0]), ("output_device", output)):
        if index != own.index:
            raise ValueError(
                f"gradsync: {name} is {own.type}:{index}, but the module is on {own}; move the "
                "module to its device before wrapping it, one device for each process"
            )
    return ids, output
