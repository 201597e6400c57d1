"""One entrant: `python -m experiments.benchmarks.peers MODULE COURSE.json`."""

import sys
from importlib import import_module


if __name__ == "__main__":
    import_module(f"experiments.benchmarks.peers.{sys.argv[1]}").main(sys.argv[2])
