"""Keeping torch.compile out of the wrapper itself."""

from __future__ import annotations

import sys
import types
from typing import Any, Callable, Generic, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class uncompiled(Generic[_Function]):  # noqa: N801  # a decorator
    """Decorates a method: torch.compile leaves it alone, and compiles what it calls.

    Loading PyTorch's compiler takes seconds, so this does not load it. The compiler looks the
    method up before it compiles anything, and that look-up marks the method.
    """

    def __init__(self, function: _Function) -> None:
        self._function = function
        self._owner: type | None = None
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        function: Any = self._function
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is not None and self._owner is not None:
            function = disable(function, recursive=False)
            setattr(self._owner, self._function.__name__, function)
        return function if instance is None else types.MethodType(function, instance)
