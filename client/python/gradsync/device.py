"""GPUs."""

from __future__ import annotations

import ctypes

from gradsync._library import library, raise_error

# GRADSYNC_DEVICE_UUID_SIZE.
_UUID_SIZE = 41


def cuda_device_uuid(ordinal: int) -> str:
    """UUID of this process's GPU number `ordinal`, for Session.register_layout().

    Raises:
      FailedPreconditionError: CUDA_DRIVER_MISSING; CUDA_DRIVER_TOO_OLD; GPU_UNUSABLE: there is no
        such device, or it cannot be opened.
      ResourceExhaustedError: MPS_FULL.
      UnimplementedError: the library was built without CUDA.
    """
    uuid = ctypes.create_string_buffer(_UUID_SIZE)
    if error := library.cuda_device_uuid(ordinal, uuid):
        raise_error(error)
    return uuid.value.decode()
