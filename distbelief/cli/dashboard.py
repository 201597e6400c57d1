"""The command `distbelief dashboard`: a page that shows runs live, in a browser."""

from pathlib import Path
from queue import SimpleQueue

import typer

from distbelief.cli import options as o
from distbelief.core.errors import JobError
from distbelief.core.signals import caught_signals


@o.reported
def dashboard(
    run_directories: list[Path] | None = o.argument(
        "RUN_DIR ...", "Run directories, running or ended. Several are shown side by side.", None
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
        "A file with the token that readers must have. Default: none on a loopback address, "
        "elsewhere a new one.",
    ),
) -> None:
    """Show runs on a live page in the browser, until Ctrl+C.

    [dim]$[/dim] distbelief dashboard runs/digits

    [dim]$[/dim] distbelief dashboard runs/digits runs/digits.2

    It prints the address of the page. Only files of the run directories are
    read, and the page asks no other server for anything. Its address has
    /metrics for Prometheus, too.

    On a loopback address every user of this host can read it, unless there is a
    token file. For a run on another host open a tunnel, such as
    ssh -L 7788:127.0.0.1:7788 HOST.
    """
    from distbelief.dashboard import server  # noqa: PLC0415 -- start quickly

    if not run_directories:
        raise JobError(
            "no run to show: name a run directory, as in `distbelief dashboard runs/digits`"
        )
    for path in map(str, run_directories):
        if path.startswith(("http:/", "https:/")):
            raise JobError(
                f"{path} is an address: name run directories. Where they are, on the other host, "
                "run `distbelief dashboard`, and open the address that it prints in a browser"
            )
    runs = server.directories([str(path) for path in run_directories])
    listening = server.listen(listen)
    token = server.token_for(listening, token_file)
    page = server.PageServer(listening, server.Watch(runs), token=token)
    ends: SimpleQueue[object] = SimpleQueue()
    with caught_signals() as caught:
        caught.tell = ends.put
        typer.echo(f"page: {server.url(listening, token)}   (Ctrl+C ends it)")
        server.serve(page, ends)
