"""Benchmarks: everything compared in one run, in turns, and reported as ratios.

Run one as `python experiments/benchmarks/NAME.py`; its last line is one JSON object,
`{"benchmark": NAME, "figures": {KEY: NUMBER, ...}}`. With `--small` it takes the least of
everything: that shows that it runs, and its figures mean nothing.

`make bench` runs them all, except those whose first lines say why not.
"""

import sys
from pathlib import Path


# Python looks beside a program first, where a benchmark is called as the package `sandblaster`.
_BESIDE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != _BESIDE]
