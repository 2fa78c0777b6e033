"""ResNet50 for 224 x 224 images, tensor by tensor, in torchvision's order of registration.

161 tensors, 25 557 032 elements (torchvision's documentation of resnet50: num_params).
"""

from __future__ import annotations

from .model import Model, Tensor

_IMAGE = 224
_CLASSES = 1000
# Blocks, channels inside a block, stride of its first block.
_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
_EXPANSION = 4


def resnet50() -> Model:
    """He et al. 2015, the variant with the stride in a block's 3 x 3 convolution."""
    tensors: list[Tensor] = []
    side = _IMAGE // 2
    _convolution(tensors, "conv1", "bn1", 3, 64, 7, side)
    side //= 2  # the pooling
    channels = 64
    for stage, (blocks, width, first_stride) in enumerate(_STAGES, start=1):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            name = f"layer{stage}.{block}."
            _convolution(tensors, name + "conv1", name + "bn1", channels, width, 1, side)
            inner = side // stride
            _convolution(tensors, name + "conv2", name + "bn2", width, width, 3, inner)
            out = width * _EXPANSION
            _convolution(tensors, name + "conv3", name + "bn3", width, out, 1, inner)
            if block == 0:
                down = name + "downsample."
                _convolution(tensors, down + "0", down + "1", channels, out, 1, inner)
            channels, side = out, inner
    tensors.append(Tensor("fc.weight", (_CLASSES, channels), 2.0 * _CLASSES * channels))
    tensors.append(Tensor("fc.bias", (_CLASSES,), float(_CLASSES)))
    return Model("resnet50", tuple(tensors))


def _convolution(
    tensors: list[Tensor], name: str, norm: str, channels: int, out: int, kernel: int, side: int
) -> None:
    """A convolution without bias to `side` x `side` pixels, and its batch normalization."""
    pixels = side * side
    operations = 2.0 * channels * out * kernel * kernel * pixels
    tensors.append(Tensor(f"{name}.weight", (out, channels, kernel, kernel), operations))
    tensors.append(Tensor(f"{norm}.weight", (out,), 2.0 * out * pixels))
    tensors.append(Tensor(f"{norm}.bias", (out,), 2.0 * out * pixels))
