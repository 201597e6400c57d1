"""What Sandblaster takes beyond the pure gradient, on the speech net of the paper."""

import json
import subprocess
import sys
from typing import Final

from experiments.benchmarks import measurement
from experiments.benchmarks.batch_jobs import N_REPLICAS, job


_PURE: Final = """
import sys, time
import torch
from torch.nn import functional
from distbelief.allocator import keep_memory
from experiments.benchmarks.workload import Workload
keep_memory()  # as the processes of a job do
torch.set_num_threads(1)
n_frames, portion, small = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
load = Workload(net="speech", batch_size=portion, small=small)
net, (inputs, targets) = load.module(), load.samples()
def portion_gradient():
    (functional.cross_entropy(net(inputs), targets) * len(inputs)).backward()
portion_gradient()
print("ready", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
for _ in range(n_frames // portion):
    portion_gradient()
print(time.perf_counter() - begun)
"""


def overhead(*, small: bool) -> dict[str, float]:
    """Compare evaluations with the pure gradient."""
    portion, n_frames = 250, 2_000 if small else 20_000
    before = _pure_seconds(n_frames, portion, small=small)
    ours = job(
        {
            "model": {
                "factory": "experiments.benchmarks.speech_frames:net",
                "arguments": {"small": small},
                "initial": "seed",
            },
            "data": {
                "train": {
                    "factory": "experiments.benchmarks.speech_frames:frames",
                    "arguments": {"n": n_frames, "small": small},
                }
            },
            "algorithm": {
                "name": "sandblaster",
                "loss": "cross_entropy",
                "portion": portion,
                "history": 3,
                "max_evaluations": 30 if small else 4,
            },
            "cluster": {"replicas": N_REPLICAS, "shards": 2},
        }
    )
    after = _pure_seconds(n_frames, portion, small=small)
    seconds = ours.seconds_per_example() * n_frames
    pure = (before + after) / 2
    rows = {
        "pure gradient": {"seconds": f"{before:.2f}, {after:.2f}"},
        "sandblaster": {"seconds": f"{seconds:.2f}"},
    }
    measurement.show(f"speech net, {n_frames:,} frames, {N_REPLICAS} processes", rows)
    return {"overhead": seconds / pure - 1.0}


def _pure_seconds(n_frames: int, portion: int, *, small: bool) -> float:
    """Return the time in which plain processes compute the gradient side by side."""
    arguments = [str(n_frames // N_REPLICAS), str(portion), str(int(small))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PURE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(N_REPLICAS)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:  # all begin before any is waited for
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [process.communicate()[0] for process in processes]
    return max(float(json.loads(end)) for end in ends)
