"""A process that takes a step when it is told to, and says how long each took.

    parent                    process
      | <-------- ready          |   after some steps that warm up
      | n ---------------------> |   a line of its standard input
      | <-- [0.7, 0.7, ...]      |   seconds of n steps, a line of standard output
      | (end of input) --------> |   it ends

Between turns it waits for a line, which costs nothing.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable


READY = "ready"
N_WARM_STEPS = 3


def obey(step: Callable[[], None], *, n_warm: int = N_WARM_STEPS) -> None:
    """Take steps as told on standard input, until it ends."""
    for _ in range(n_warm):
        step()
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(step, n_steps=int(line))), flush=True)


def timed(step: Callable[[], None], *, n_steps: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(n_steps):
        step()
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]
