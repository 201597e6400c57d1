"""MkDocs hook: puts every command and option into reference/command-line.md.

They are read from the command line's own definition, so the page cannot be out of date.
"""

from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from distbelief.cli.main import app


MARKER = "<!-- every command -->"
BETWEEN_COMMANDS = "\n```\n\n```text\n"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker by the commands (called by MkDocs for each page)."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(_lines()).replace(BETWEEN_COMMANDS, "\n"))


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with its full name."""
    yield from _below("distbelief", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 -- typer's own, untyped
    if hasattr(command, "commands"):
        for below, each in command.commands.items():
            yield from _below(f"{name} {below}", each)
    else:
        yield name, command


def _lines() -> Iterator[str]:
    for name, command in commands():
        yield from ("", f"## {name}", "", *_help(command.help or ""), "")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            yield from ("| argument | meaning |", "|---|---|")
            for argument in arguments:
                yield f"| `{argument.metavar or argument.name}` | {_text(argument)} |"
            yield ""
        options = [p for p in command.params if p.param_type_name == "option"]
        yield from ("| option | meaning | default |", "|---|---|---|")
        for option in options:
            if not option.hidden:
                yield _option(option)
        yield ""


def _option(option: Any) -> str:  # noqa: ANN401
    written = f"{', '.join(option.opts)} {(option.metavar or '').strip()}".strip()
    shown = option.show_default
    default = shown if isinstance(shown, str) else option.default
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"| `{written}` | {_text(option)} | {default if is_plain else ''} |"


def _text(parameter: Any) -> str:  # noqa: ANN401
    text = _plain(" ".join((parameter.help or "").split()))
    bounds = [
        f"{word} {bound:,g}"
        for word, bound in (("at least", parameter.min), ("at most", parameter.max))
        if bound is not None
    ]
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _help(text: str) -> Iterator[str]:
    """Yield the help text; paragraphs of commands and code become blocks."""
    for paragraph in _plain(text).replace("\b", "").split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        if lines and lines[0].lstrip().startswith(("$", "from ")):
            yield from ("```text", *lines, "```", "")
        elif lines:
            yield from (*(line.strip() for line in lines), "")


def _plain(text: str) -> str:
    return Text.from_markup(text).plain
