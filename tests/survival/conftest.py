"""The modules of tools/survival can be imported."""

import pathlib
import sys

_TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path[:0] = [str(_TOOLS / "survival"), str(_TOOLS / "bench")]
