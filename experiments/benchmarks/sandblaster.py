"""What Sandblaster costs: `batches.benchmark` says of what, and how it is measured.

python experiments/benchmarks/sandblaster.py [--small] [--only NAME ...]
"""

import sys
from importlib import import_module
from pathlib import Path


if __name__ == "__main__":
    # Python looks beside a program first, where the package of this name is not.
    beside = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != beside]
    import_module("experiments.benchmarks.batches.benchmark").main()
