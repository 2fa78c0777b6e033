"""What is trained: its parameters, and how backward's time is spread over them."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter and the work that its layer does.

    Attributes:
      name: as the framework calls it.
      shape: of the parameter, float32.
      operations: floating-point operations of its layer's forward pass, of one sample. Backward
        takes time in proportion to them.
    """

    name: str
    shape: tuple[int, ...]
    operations: float = 0.0

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Model:
    """Tensors in the order in which the framework registers them, forward's order."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor's gradient, for bucket_layout.plan()."""
        return [4 * tensor.elements for tensor in self.tensors]

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    def backward_shares(self) -> list[float]:
        """The shares of backward's time, in the tensors' order; they add up to 1.

        A tensor without operations (an embedding's rows are looked up, not multiplied) costs no
        time of its own. A model without any spreads its time by elements.
        """
        weights = [tensor.operations for tensor in self.tensors]
        total = sum(weights)
        if total <= 0:
            weights = [float(tensor.elements) for tensor in self.tensors]
            total = sum(weights) or 1.0
        return [weight / total for weight in weights]
