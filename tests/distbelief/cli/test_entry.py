import os
import signal
import subprocess
import sys
from pathlib import Path


INTERRUPTED = """
import os, signal, sys

class Hand:
    def find_spec(self, name, path, target=None):
        if name == "distbelief.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal
sys.meta_path.insert(0, Hand())
from distbelief.cli.entry import main
main()
"""


def test_who_interrupts_the_start_reads_no_traceback() -> None:
    """Ctrl+C within a quarter of a second of the command was a page of text."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")
