"""How fast and how true the simulated cluster is: `simulated` says of what, and how.

    python experiments/benchmarks/simulation.py [--only speed memory large truth]
        [--small]

Not in `make bench`: the jobs of `truth` alone take a quarter of an hour.
"""

import sys
from importlib import import_module
from pathlib import Path


if __name__ == "__main__":
    # Python looks beside a program first, where a module is called sandblaster.
    beside = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != beside]
    import_module("experiments.benchmarks.simulated.benchmark").main()
