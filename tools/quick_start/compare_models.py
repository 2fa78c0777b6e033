"""Prints as JSON how two saved models differ, bit by bit: compare_models.py FIRST SECOND"""

import json
import sys

import torch


def main() -> None:
    """Compares."""
    first, second = (torch.load(path, weights_only=True) for path in sys.argv[1:])
    names = [*first, *(name for name in second if name not in first)]
    different = [
        name
        for name in names
        if name not in first
        or name not in second
        or first[name].numpy().tobytes() != second[name].numpy().tobytes()
    ]
    size = sum(tensor.nbytes for tensor in first.values())
    print(json.dumps({"tensors": len(names), "bytes": size, "different": different}))


if __name__ == "__main__":
    main()
