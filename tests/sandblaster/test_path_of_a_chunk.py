"""The library files that one chunk of L-BFGS passes through."""

import sys
from pathlib import Path
from types import FrameType
from typing import Final

import distbelief
from distbelief.protocol import BeginEvaluation, CommandDone, ShardCommand, WorkReport
from distbelief.protocol.role import Received, Send
from distbelief.simulation.driver import HandledEvent
from sandblaster.optimizers.base import Evaluate
from tests.sandblaster.test_outcomes import Scripted
from tests.simulation.sandblasts import Sandblast


N_FILES_MAX: Final = 24
"""Bound on their number, to be lowered."""

ROOT: Final = Path(distbelief.__file__).parents[1]
PACKAGES: Final = (f"{ROOT}/distbelief/", f"{ROOT}/sandblaster/")
DRIVER: Final = str(ROOT / "distbelief/simulation") + "/"


def test_a_chunk_passes_through_few_files() -> None:
    """Deal, fetch, compute, commit token, push, staged: on coordinator, worker and shard."""
    # Evaluations without an iteration: nothing is saved in between.
    method = Scripted((Evaluate(point="parameters", gradient="g"),) * 3, [])
    run = Sandblast(n_shards=1, n_replicas=1, method=method)
    files: set[str] = set()
    begins: list[BeginEvaluation] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        del event, argument
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES) and not name.startswith(DRIVER):
            files.add(name.removeprefix(f"{ROOT}/"))

    def see(happening: HandledEvent) -> None:
        """Watch from when the shard has published the third point until a chunk is staged."""
        message = happening.event.message if isinstance(happening.event, Received) else None
        sent = [action.message for action in happening.actions if isinstance(action, Send)]
        if isinstance(message, ShardCommand) and isinstance(message.task, BeginEvaluation):
            begins.append(message.task)
        if len(begins) == 3 and any(isinstance(one, CommandDone) for one in sent):
            sys.setprofile(profile)
        is_staged = isinstance(message, WorkReport) and any(r.staged for r in message.results)
        if len(begins) == 3 and is_staged:
            begins.extend(begins)  # enough was seen
            sys.setprofile(None)

    run.cluster.observe(see)
    before = sys.getprofile()
    try:
        run.play()
    finally:
        sys.setprofile(before)
    shown = "\n".join(sorted(files))
    assert "sandblaster/coordinator/work_queue.py" in files
    assert len(files) <= N_FILES_MAX, shown
