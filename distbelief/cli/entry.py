"""Where the program is entered: before anything that takes time is imported.

Python answers Ctrl+C by an exception, which is a page of text if it comes while the
command line itself is imported, for a quarter of a second. Until then the process ends
as any other program does: at once, and in silence.
"""

import signal


def main() -> None:
    """Run the command line; the entry point of the program."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody ignores it: so do we
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from distbelief.cli.main import app  # noqa: PLC0415 -- takes time

    signal.signal(signal.SIGINT, before)
    app()
