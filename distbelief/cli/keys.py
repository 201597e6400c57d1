"""Commands about keys: `distbelief keys new`, `show`, `allow`, `revoke`, `rotate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from distbelief.cli import options as o
from distbelief.core.errors import JobError


if TYPE_CHECKING:
    from distbelief.transport.keys import KeyFiles


DEFAULT: Final = Path("~/.distbelief/keys")

_KEYS = o.option(DEFAULT, "DIR", "Directory with this host's keys and allow-list.", "--keys")

keys = typer.Typer(
    no_args_is_help=True,
    help="Keys with which hosts identify themselves to each other.",
    rich_markup_mode="rich",
)


@keys.command()
@o.reported
def new(*, directory: Path = _KEYS) -> None:
    """Create this host's key pair and print the public key.

    The secret key is stored in a file that only you can read. It is never
    printed.
    """
    typer.echo(_files(directory).make())


@keys.command()
@o.reported
def show(*, directory: Path = _KEYS, as_json: bool = o.AS_JSON) -> None:
    """Print this host's public key and the keys that it allows."""
    files = _files(directory)
    next_pair = files.next_pair()
    entries = files.allowed()
    content = {
        "directory": str(files.directory),
        "key": files.pair().public,
        "next": None if next_pair is None else next_pair.public,
        "allowed": [{"key": e.key, "roles": list(e.roles), "name": e.name} for e in entries],
    }
    if as_json:
        typer.echo(json.dumps(content))
        return
    typer.echo(f"{content['key']}  this host ({files.directory})")
    if next_pair is not None:
        typer.echo(f"{next_pair.public}  next key (use it: distbelief keys rotate --finish)")
    for entry in entries:
        typer.echo(f"{entry.key}  {entry.name}, as {' and '.join(entry.roles)}")
    if not entries:
        typer.echo(
            "no other key is allowed yet; to allow one: distbelief keys allow KEY NAME "
            "(with --role host for a host that joins jobs)"
        )


@keys.command()
@o.reported
def allow(
    key: str = o.argument("KEY", "The public key of the other host."),
    name: str = o.argument("NAME", "Your name for this key."),
    *,
    roles: list[str] | None = o.option(
        None,
        "ROLE",
        "What the owner of the key may connect as: worker (a training loop of its "
        "own), host (joins jobs) or server. May be repeated.",
        "--role",
        shown="worker",
    ),
    directory: Path = _KEYS,
) -> None:
    """Allow a public key to connect to this host.

    A running server applies it at once. To change the roles of a key, allow it
    again.
    """
    from distbelief.transport.keys import Allowed, public_key  # noqa: PLC0415 -- pyzmq

    entry = Allowed(
        key=public_key(key),
        roles=tuple(dict.fromkeys(",".join(roles or ["worker"]).split(","))),
        name=name,
    )
    files = _files(directory)
    if entry.key == files.pair().public:
        raise JobError(
            f"{entry.key} is this host's own key: give the one that "
            "`distbelief keys show` prints on the other host"
        )
    files.allow(entry)
    typer.echo(f"{name} is allowed as {' and '.join(entry.roles)}")


@keys.command()
@o.reported
def revoke(
    which: str = o.argument("KEY or NAME", "A key, or all keys with this name."),
    *,
    directory: Path = _KEYS,
) -> None:
    """Stop allowing a key, or all keys with a name.

    A running server closes their connections at once.
    """
    for entry in _files(directory).revoke(which):
        typer.echo(f"{entry.key} ({entry.name}) is no longer allowed")


@keys.command()
@o.reported
def rotate(
    *, finish: bool = o.flag("--finish", "Start using the new key."), directory: Path = _KEYS
) -> None:
    """Replace this host's key in two steps.

    The first step creates the next key, which you then allow on the other
    hosts. The second step (--finish) starts using it.

    [dim]$[/dim] distbelief keys rotate

    [dim]$[/dim] distbelief keys rotate --finish
    """
    files = _files(directory)
    if finish:
        key = files.finish_rotation()
        typer.echo(
            f"{key}\nis now this host's key. Running processes keep the old key until "
            "they restart. After that, on the other hosts: distbelief keys revoke "
            "OLD_KEY, which closes connections that still use it"
        )
        return
    key = files.begin_rotation()
    typer.echo(
        f"{key}\nis the next key. On each host that allows this one: distbelief keys "
        f"allow {key} NAME, with the same --role as the present key "
        "(see: distbelief keys show). Then, here: distbelief keys rotate --finish"
    )


def _files(directory: Path) -> "KeyFiles":
    from distbelief.transport.keys import KeyFiles  # noqa: PLC0415 -- pyzmq

    return KeyFiles(directory.expanduser())
