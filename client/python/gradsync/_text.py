"""Strings for the library: UTF-8, ended by NUL."""

from __future__ import annotations

from gradsync import errors
from gradsync.reason import Reason


def encode(text: str, name: str) -> bytes:
    """The bytes of `text`.

    Raises:
      InvalidArgumentError: it holds a NUL or a lone surrogate; the message says `name`.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidArgumentError(
            f"{name} is not text: {error}", reason=Reason.MALFORMED
        ) from error
    if b"\0" in encoded:
        raise errors.InvalidArgumentError(f"{name} holds a NUL", reason=Reason.MALFORMED)
    return encoded
