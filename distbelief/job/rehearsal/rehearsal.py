"""The machines of one plan as processes of this host, without parameter servers.

    folder/spec.json            what they are told
    folder/.ROLE.1              the socket where each can be reached
    folder/MACHINE.endpoint     that it can be
    folder/output.npy           what they compute, each its own regions
    folder/gradient-K.npy       of tensor K, likewise
    folder/MACHINE.json         what each has measured
    folder/MACHINE.alive        that each lives (`pulse`)
    folder/MACHINE.log          what each has to say

For `distbelief predict`, and for `distbelief partition --verify`. They are the machines
of a job (`runtime.machine`), talk over ZeroMQ as those do, and differ in what they
compute for (`hand`). Values come from a file of whole tensors, of which each reads its
regions. If one of them ends too early, or is silent for too long, all are ended.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.errors import DistBeliefError, JobError
from distbelief.job.rehearsal.pulse import Pulse
from distbelief.runtime.task.samples import Sample
from distbelief.runtime.task.task import TaskSpec


END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.02
SECONDS_MAX: Final = 24 * 3600.0
SEED: Final = (0, 0)
"""Of the randomness of all steps."""

_LOG_MAX: Final = 2000  # characters of it that are shown


@final
class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What all machines are told.

    Attributes:
        folder: Where files lie.
        run: Name of this rehearsal, which is in every message.
        task: Model and loss.
        sample: What the data are like.
        plan: Path of the plan.
        weights: Path of whole tensors by name (.safetensors).
        inputs: Path of all inputs: (n_samples, *shape), .npy.
        targets: Of their targets; "" to predict.
        n_samples: How many there are.
        n_steps: Steps to take. To predict: as many as it takes to have seen all.
        n_warm: Steps at the beginning that do not count.
        dtype: "float32" or "float64".
        device: What machines compute on.
        threads: Of torch, in each process.
        import_paths: Directories where import paths are looked up first.
    """

    folder: str
    run: str
    task: TaskSpec
    sample: Sample
    plan: str
    weights: str
    inputs: str
    targets: str = ""
    n_samples: int
    n_steps: int
    n_warm: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    import_paths: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return bool(self.targets)

    def path(self, name: str) -> Path:
        """Return where one of its files lies."""
        return Path(self.folder) / name


@final
class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine has measured.

    Attributes:
        seconds: Of each step that counts, from the end of the one before to its own.
        n_bytes: Sent in all steps, by receiver.
        loss: Sum over the samples of a step, if this machine knows it.
    """

    seconds: tuple[float, ...] = ()
    n_bytes: dict[int, int] = {}
    loss: float | None = None


def rehearse(
    rehearsal: Rehearsal, *, n_machines: int, tell: Callable[[str], None] | None = None
) -> list[Seen]:
    """Run all machines until they end; return what each has measured.

    Args:
        rehearsal: What they are told.
        n_machines: How many they are.
        tell: Told of a machine that is silent, and when it is back.

    Raises:
        JobError: a machine says that the user's model or data are at fault.
        DistBeliefError: a machine failed for another reason, was ended, or has been
            silent for too long.
    """
    spec = rehearsal.path("spec.json")
    spec.write_bytes(msgspec.json.encode(rehearsal))
    hands: list[subprocess.Popen[bytes]] = []
    try:
        for machine in range(n_machines):
            with rehearsal.path(f"{machine}.log").open("wb") as log:
                command = [sys.executable, "-m", "distbelief.job.rehearsal.hand"]
                hands.append(
                    subprocess.Popen(  # noqa: S603 -- our own program
                        [*command, str(spec), str(machine), str(n_machines)],
                        stdin=subprocess.PIPE,  # it ends when we do
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _await(hands, rehearsal, tell)
    finally:
        _end(hands)
    return [
        msgspec.json.decode(rehearsal.path(f"{m}.json").read_bytes(), type=Seen)
        for m in range(n_machines)
    ]


def _await(
    hands: Sequence[subprocess.Popen[bytes]],
    rehearsal: Rehearsal,
    tell: Callable[[str], None] | None,
) -> None:
    begun = time.monotonic()
    paths = [rehearsal.path(f"{machine}.alive") for machine in range(len(hands))]
    pulse = Pulse(paths, pids=[hand.pid for hand in hands], now=begun)
    while (now := time.monotonic()) < begun + SECONDS_MAX:
        codes = [hand.poll() for hand in hands]
        failed = [m for m, code in enumerate(codes) if code not in {None, 0}]
        if failed:
            # Who fails first is seldom who is at fault: the others miss it.
            raise _failure(failed[0], codes[failed[0]] or 0, rehearsal)
        if None not in codes:
            return
        left = [m for m, code in enumerate(codes) if code is None]
        for text in pulse.look(now, left=left):
            if tell is not None:
                tell(text)
        time.sleep(POLL_SECONDS)
    raise DistBeliefError(f"machines have not ended within {SECONDS_MAX:.0f} s")


def _failure(machine: int, code: int, rehearsal: Rehearsal) -> DistBeliefError:
    error = rehearsal.path(f"{machine}.error")
    if error.is_file():
        return JobError(f"machine {machine}: {error.read_text()}")
    log = rehearsal.path(f"{machine}.log").read_text(errors="replace")[-_LOG_MAX:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return DistBeliefError(f"machine {machine} {how}; it said:\n{log}")


def _end(hands: Sequence[subprocess.Popen[bytes]]) -> None:
    for hand in hands:
        hand.kill()
    for hand in hands:
        hand.wait(timeout=END_SECONDS)
        if hand.stdin is not None:
            hand.stdin.close()
