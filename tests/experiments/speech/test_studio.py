"""Sessions that end badly; in a process of their own, for they fork."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from experiments.speech.casting import Casting
from experiments.speech.errors import SessionError
from experiments.speech.espeak import Espeak
from experiments.speech.studio import Studio


ROOT = Path(__file__).parents[3]
GOOD = Casting(part="train", seed=0, clean=True, variants=["m1"], sentences=["It is read aloud."])


class FatalSentences:
    """Ends the process that wants to read one."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return str(index)


def find_endings() -> list[str]:
    espeak = Espeak()
    fatal = cast("Sequence[str]", FatalSentences())
    studios = [
        Studio(espeak, casting=replace(GOOD, sentences=[]), n_workers=2),
        Studio(espeak, casting=replace(GOOD, sentences=fatal), n_workers=2),
        Studio(espeak, casting=GOOD, n_workers=2, session_seconds=0.0),
    ]
    endings = []
    for studio in studios:
        try:
            next(studio.hold_sessions(7))
        except SessionError as error:
            endings.append(str(error))
    sessions = Studio(espeak, casting=GOOD, n_workers=3).hold_sessions(0)
    endings += [next(sessions).voice.partition("+")[2] for _ in range(4)]
    sessions.close()
    return [*endings, f"children left: {has_children()}"]


def has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def test_a_session_that_fails_dies_or_hangs_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.experiments.speech.test_studio"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    failed, died, hung, *good, children = done.stdout.splitlines()
    assert failed.startswith("recording session ")
    assert "of the train part failed: ValueError: " in failed
    assert died.endswith("of the train part was ended by SIGKILL")
    assert hung.endswith("of the train part did not end in 0 s and was stopped")
    assert good == ["m1"] * 4
    assert children == "children left: False"


if __name__ == "__main__":
    sys.stdout.write("\n".join(find_endings()))
