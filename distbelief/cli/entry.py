"""The entry point of the program; it imports nothing slow before signals are set."""

import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    # Importing the command line takes a quarter of a second. Ctrl+C in that time would print
    # a traceback; with the default handler the process just ends. A caller that ignores
    # SIGINT (nohup, a shell script) keeps it ignored.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from distbelief.cli.main import app  # noqa: PLC0415 -- takes time

    signal.signal(signal.SIGINT, before)
    app()
