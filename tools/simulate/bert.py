"""BERT, tensor by tensor, in the order of registration of Hugging Face's BertModel.

Base: 109 482 240 elements in 199 tensors; large: 335 141 888 in 391. The paper does not say which
of them it means; here "BERT" is the large one, as its measured throughput is (profiles/).
"""

from __future__ import annotations

from .model import Model, Tensor

_VOCABULARY = 30522
_POSITIONS = 512
_TYPES = 2
# Tokens of a sample; only the attention's small share of a layer's work depends on it.
_LENGTH = 512


def bert(size: str) -> Model:
    """Args: size: "base" or "large"."""
    layers, width = {"base": (12, 768), "large": (24, 1024)}[size]
    tensors: list[Tensor] = []
    embeddings = "embeddings."
    # Rows are looked up: no multiplication, and the gradient is ready when backward ends.
    tensors.append(Tensor(embeddings + "word_embeddings.weight", (_VOCABULARY, width)))
    tensors.append(Tensor(embeddings + "position_embeddings.weight", (_POSITIONS, width)))
    tensors.append(Tensor(embeddings + "token_type_embeddings.weight", (_TYPES, width)))
    _norm(tensors, embeddings + "LayerNorm", width)
    for layer in range(layers):
        name = f"encoder.layer.{layer}."
        attention = name + "attention."
        _linear(tensors, attention + "self.query", width, width)
        _linear(tensors, attention + "self.key", width, width)
        # Scores and their use lie behind the values: backward passes them before the three.
        scores = 4.0 * _LENGTH * _LENGTH * width
        _linear(tensors, attention + "self.value", width, width, scores)
        _linear(tensors, attention + "output.dense", width, width)
        _norm(tensors, attention + "output.LayerNorm", width)
        _linear(tensors, name + "intermediate.dense", width, 4 * width)
        _linear(tensors, name + "output.dense", 4 * width, width)
        _norm(tensors, name + "output.LayerNorm", width)
    tensors.append(Tensor("pooler.dense.weight", (width, width), 2.0 * width * width))
    tensors.append(Tensor("pooler.dense.bias", (width,), float(width)))
    return Model(f"bert-{size}", tuple(tensors))


def _linear(
    tensors: list[Tensor], name: str, inputs: int, outputs: int, more_operations: float = 0.0
) -> None:
    operations = 2.0 * inputs * outputs * _LENGTH + more_operations
    tensors.append(Tensor(f"{name}.weight", (outputs, inputs), operations))
    tensors.append(Tensor(f"{name}.bias", (outputs,), float(outputs * _LENGTH)))


def _norm(tensors: list[Tensor], name: str, width: int) -> None:
    for kind in ("weight", "bias"):
        tensors.append(Tensor(f"{name}.{kind}", (width,), 2.0 * width * _LENGTH))
