"""Commands about keys: `distbelief keys new`, `show`, `allow`, `revoke`, `rotate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from distbelief.cli.options import JsonOption, TracebackOption, reported_errors
from distbelief.errors import JobError


if TYPE_CHECKING:
    from distbelief.transport.keys import KeyFiles


DEFAULT: Final = Path("~/.distbelief/keys")

KeysOption = Annotated[
    Path,
    typer.Option("--keys", metavar="DIR", help="Where this machine's keys and allow-list are."),
]
RoleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="As what its holder may speak: worker (its own training loop), host (a "
        "machine that joins jobs) or server. May be given several times.",
        show_default="worker",
    ),
]

keys = typer.Typer(
    no_args_is_help=True,
    help="The keys by which machines know each other.",
    rich_markup_mode="rich",
)


@keys.command()
def new(*, directory: KeysOption = DEFAULT, tracebacks: TracebackOption = False) -> None:
    """Make this machine's key, and print the public one.

    The secret one stays in a file that only you can read, and is never printed.
    """
    with reported_errors(show_traceback=tracebacks):
        typer.echo(_files(directory).make())


@keys.command()
def show(
    *,
    directory: KeysOption = DEFAULT,
    as_json: JsonOption = False,
    tracebacks: TracebackOption = False,
) -> None:
    """Print this machine's public key, and whom it lets in."""
    with reported_errors(show_traceback=tracebacks):
        files = _files(directory)
        following = files.next_pair()
        entries = files.allowed()
        content = {
            "directory": str(files.directory),
            "key": files.pair().public,
            "next": None if following is None else following.public,
            "allowed": [{"key": e.key, "roles": list(e.roles), "name": e.name} for e in entries],
        }
        if as_json:
            typer.echo(json.dumps(content))
            return
        typer.echo(f"{content['key']}  this machine ({files.directory})")
        if following is not None:
            typer.echo(f"{following.public}  follows it (keys rotate --finish)")
        for entry in entries:
            typer.echo(f"{entry.key}  {entry.name}, as {' and '.join(entry.roles)}")
        if not entries:
            typer.echo(
                "nobody is let in so far: distbelief keys allow KEY NAME (--role host: "
                "a machine that joins jobs)"
            )


@keys.command()
def allow(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A public key.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What you call it.")],
    *,
    roles: RoleOption = None,
    directory: KeysOption = DEFAULT,
    tracebacks: TracebackOption = False,
) -> None:
    """Let in the holder of a public key, as a worker unless you say otherwise.

    A server that is running takes note of it at once.
    """
    with reported_errors(show_traceback=tracebacks):
        from distbelief.transport.keys import Allowed, public_key  # noqa: PLC0415 -- pyzmq

        entry = Allowed(
            key=public_key(key),
            roles=tuple(dict.fromkeys(",".join(roles or ["worker"]).split(","))),
            name=name,
        )
        files = _files(directory)
        if entry.key == files.pair().public:
            raise JobError(
                f"{entry.key} is this machine's own key, which need not be allowed: "
                "give the one that `distbelief keys show` prints on the other machine"
            )
        files.allow(entry)
        typer.echo(f"{name} is let in as {' and '.join(entry.roles)}")


@keys.command()
def revoke(
    which: Annotated[str, typer.Argument(metavar="KEY or NAME", help="Who.")],
    *,
    directory: KeysOption = DEFAULT,
    tracebacks: TracebackOption = False,
) -> None:
    """Let in a key, or all keys of a name, no longer.

    A server that is running closes their connections at once.
    """
    with reported_errors(show_traceback=tracebacks):
        for entry in _files(directory).revoke(which):
            typer.echo(f"{entry.key} ({entry.name}) is let in no longer")


@keys.command()
def rotate(
    *,
    finish: Annotated[
        bool, typer.Option("--finish", metavar=" ", help="Use the new key from now on.")
    ] = False,
    directory: KeysOption = DEFAULT,
    tracebacks: TracebackOption = False,
) -> None:
    """Replace this machine's key: first tell others of the next, then use it.

    [dim]$[/dim] distbelief keys rotate

    [dim]$[/dim] distbelief keys rotate --finish
    """
    with reported_errors(show_traceback=tracebacks):
        files = _files(directory)
        if finish:
            key = files.finish_exchange()
            typer.echo(
                f"{key}\nis this machine's key from now on; what runs keeps the old "
                "one until it is started again. After that, on the others: distbelief "
                "keys revoke the old one, which puts out who still uses it"
            )
            return
        key = files.begin_exchange()
        typer.echo(
            f"{key}\nis the next key. Where this machine is let in: distbelief keys "
            f"allow {key} NAME, with the --role that its present key has there "
            "(distbelief keys show); then, here: distbelief keys rotate --finish"
        )


def _files(directory: Path) -> "KeyFiles":
    from distbelief.transport.keys import KeyFiles  # noqa: PLC0415 -- pyzmq

    return KeyFiles(directory.expanduser())
