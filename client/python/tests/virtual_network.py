"""Nodes on one machine, for a test; see tools/virtual_network."""

import json
import pathlib
import subprocess

_TREE = pathlib.Path(__file__).resolve().parents[3]
_PROGRAM = _TREE / "bazel-bin/tools/virtual_network/virtual-network"


class VirtualNetwork:
    """The network that `virtual-network` makes and describes, until close().

    Attributes:
      real: nodes are network namespaces, not loopback addresses.
      description: what the nodes are, in words.
      nodes: dictionaries with `address` and `command_prefix`.
    """

    def __init__(self, nodes):
        self._process = subprocess.Popen(
            [_PROGRAM, f"--nodes={nodes}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        described = json.loads(self._process.stdout.readline())
        self.real = described["kind"] == "namespaces"
        self.description = described["description"]
        self.nodes = described["nodes"]

    def close(self):
        self._process.communicate(timeout=20)
