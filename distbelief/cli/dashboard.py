"""The command `distbelief dashboard`: a page that shows runs live, in a browser."""

import re
from pathlib import Path
from queue import SimpleQueue

import typer

from distbelief.cli import options as o
from distbelief.core.errors import JobError
from distbelief.core.signals import caught_signals


@o.reported
def dashboard(
    run_directories: list[str] | None = o.argument(
        "RUN_DIR|URL ...",
        "Run directories, running or ended; and addresses that `distbelief dashboard` printed on "
        "other hosts, for the runs shown there. All are shown side by side.",
        None,
    ),
    *,
    listen: str | None = o.option(
        None,
        "HOST:PORT",
        "Where the page can be opened. Another address than a loopback one needs a token, and "
        "sends everything unencrypted. Port 0: any free port.",
        shown="127.0.0.1:7788, or a free port",
    ),
    token_file: Path | None = o.option(
        None,
        "FILE",
        "A file with the token that readers must have, and that is sent to each URL without one. "
        "Default: none on a loopback address, elsewhere a new one.",
    ),
) -> None:
    """Show runs on a live page in the browser, until Ctrl+C.

    [dim]$[/dim] distbelief dashboard runs/digits

    [dim]$[/dim] distbelief dashboard runs/digits runs/digits.2

    [dim]$[/dim] distbelief dashboard runs/digits "http://node7:7788/?token=..."

    It prints the address of the page. Only files of the run directories are
    read, and the page asks no other server for anything. Its address has
    /metrics for Prometheus, too.

    On a loopback address every user of this host can read it, unless there is a
    token file. Nothing is encrypted: to other hosts open a tunnel, such as
    ssh -L 7789:127.0.0.1:7788 HOST, and name http://127.0.0.1:7789.
    """
    from distbelief.dashboard import remote, server  # noqa: PLC0415 -- start quickly

    if not run_directories:
        raise JobError(
            "no run to show: name a run directory, as in `distbelief dashboard runs/digits`"
        )
    urls = [name for name in run_directories if re.match("https?://", name, re.IGNORECASE)]
    runs = server.directories([name for name in run_directories if name not in urls])
    with server.listen(listen) as listening:
        token = server.token_for(listening, token_file)
        known = "" if token_file is None else token
        pages = [remote.OtherPage(url, token=known) for url in dict.fromkeys(urls)]
        page = server.PageServer(listening, server.Watch(runs, pages), token=token)
        ends: SimpleQueue[object] = SimpleQueue()
        with caught_signals() as caught:
            caught.tell = ends.put
            typer.echo(f"page: {server.url(listening, token)}   (Ctrl+C ends it)")
            server.serve(page, ends)
