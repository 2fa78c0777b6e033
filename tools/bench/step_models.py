"""The models that step.py trains, and their data."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable

import torch
from torch import nn


class _FeedForward(nn.Module):
    """A transformer's feed-forward block: most of such a model's parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class _Encoder(nn.Module):
    """A transformer's encoder that classifies sequences: many operations per parameter."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(dim=1))
        return logits


_CLASSES = 10


class _Wait(torch.autograd.Function):
    """A layer that another processor computes: it takes time, but none of the cores."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.shape = weight.shape
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], gradients[0].mean().expand(ctx.shape), None


class _Offloaded(nn.Module):
    """A layer whose forward pass takes `seconds`, and its backward pass twice that."""

    def __init__(self, width: int, hidden: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, hidden))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Wait.apply(x, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return result


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
      name: as --model says it.
      what: a short description.
      batch: samples per rank and step.
      make: makes the module, from PyTorch's random numbers.
      sample_shape: the shape of one input.
    """

    name: str
    what: str
    batch: int
    make: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]

    def batches(self, rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels. They differ from rank to rank and are the same in every run."""
        numbers = torch.Generator().manual_seed(1000 + rank)
        return [
            (
                torch.randn(self.batch, *self.sample_shape, generator=numbers),
                torch.randint(_CLASSES, (self.batch,), generator=numbers),
            )
            for _ in range(count)
        ]


def _communication_heavy(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(
        *(_FeedForward(width, 2 * width) for _ in range(blocks)), nn.Linear(width, _CLASSES)
    )


def _offloaded(width: int, blocks: int, seconds: float) -> nn.Module:
    layers = 2 * blocks
    return nn.Sequential(
        *(_Offloaded(width, 2 * width, seconds / layers) for _ in range(layers)),
        nn.Linear(width, _CLASSES),
    )


def models(quick: bool) -> dict[str, Model]:
    """All models by name. Args: quick: much smaller ones, to try the benchmark."""
    width, blocks = (64, 2) if quick else (1024, 6)
    # 4 ranks on 2 cores: backward takes about as long as the gradients on a wire of 1 Gbit/s.
    balanced_batch = 16 if quick else 400
    # The backward pass takes as long as the gradients on a wire of 1 Gbit/s, headers and all.
    offloaded_forward_s = 0.01 if quick else 0.42
    encoder_width, length, layers = (32, 8, 1) if quick else (256, 64, 2)
    all_models = [
        Model(
            "communication_heavy",
            f"{blocks} feed-forward blocks of width {width}",
            16,
            lambda: _communication_heavy(width, blocks),
            (width,),
        ),
        Model(
            "balanced",
            f"the same, with {balanced_batch} samples a step",
            balanced_batch,
            lambda: _communication_heavy(width, blocks),
            (width,),
        ),
        Model(
            "offloaded",
            f"parameters as many, {1e3 * offloaded_forward_s:.0f} ms forward and twice that back, "
            "in which the cores are free as beside a GPU",
            16,
            lambda: _offloaded(width, blocks, offloaded_forward_s),
            (width,),
        ),
        Model(
            "compute_heavy",
            f"transformer encoder, {layers} layers of width {encoder_width}, sequences of {length}",
            16,
            lambda: _Encoder(encoder_width, layers, _CLASSES),
            (length, encoder_width),
        ),
    ]
    return {model.name: model for model in all_models}


def parameter_count(module: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
