"""Turns of processes that nobody can ask: their data waits until it is their turn.

    folder/turn              one number: whose turn it is, `EVERYONE`, or `OVER`
    folder/NAME.PID.steps    times of the steps that process PID of NAME has begun

So roles of a job take turns with plain loops while all are started, warm, and hold their memory.
Files are mapped by all: the order of memory of one machine is all that is needed.
"""

import os
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray


EVERYONE: Final = -1
OVER: Final = -2
N_STEPS_MAX: Final = 1 << 16
WAIT_SECONDS: Final = 1e-3  # between two looks at whose turn it is
N_SAMPLES: Final = 1 << 13


class Track:
    """The track in `folder`; `contestants` take turns by their place in that list."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "turn"
        if not path.exists():
            np.full(1, OVER, np.int64).tofile(path)
        self._turn = np.memmap(path, np.int64, "r+")

    def give(self, turn: int) -> None:
        self._turn[0] = turn

    def await_turn(self, contestant: int) -> bool:
        """Wait until it is this contestant's turn; return False if all is over."""
        while (turn := int(self._turn[0])) not in {contestant, EVERYONE}:
            if turn == OVER:
                return False
            time.sleep(WAIT_SECONDS)
        return True

    def steps(self, contestant: int) -> dict[int, NDArray[np.float64]]:
        found = {}
        for path in self._folder.glob(f"{contestant}.*.steps"):
            times = np.fromfile(path)
            found[int(path.name.split(".")[1])] = times[: np.count_nonzero(times)]
        return found


class PacedFrames:
    """Random samples in memory; a batch is handed out when it is one's turn."""

    def __init__(self, folder: Path, *, contestant: int, n_inputs: int, n_classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(N_SAMPLES, n_inputs, generator=generator)
        self._targets = torch.randint(n_classes, (N_SAMPLES,), generator=generator)
        self._folder = folder
        self._contestant = contestant
        self._track = Track(folder)
        self._times: NDArray[np.float64] | None = None  # of steps of the process that reads
        self._n = 0

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._track.await_turn(self._contestant):
            raise EOFError("the benchmark is over")
        if self._times is None:
            path = self._folder / f"{self._contestant}.{os.getpid()}.steps"
            self._times = np.memmap(path, np.float64, "w+", shape=(N_STEPS_MAX,))
        self._times[self._n % N_STEPS_MAX] = time.monotonic()
        self._n += 1
        return self._inputs[indices], self._targets[indices]


# The factory that the job file names.
def paced_frames(folder: str, contestant: int, n_inputs: int, n_classes: int) -> PacedFrames:
    return PacedFrames(Path(folder), contestant=contestant, n_inputs=n_inputs, n_classes=n_classes)
