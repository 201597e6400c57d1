"""MkDocs hook: puts the diagrams of the message module into explanation/protocol.md."""

import inspect

import distbelief.messages as protocol


MARKER = "<!-- the protocol's diagrams -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker by the module's docstring (called for each page)."""
    if MARKER not in markdown:
        return markdown
    diagrams = inspect.getdoc(protocol) or ""  # indented, so Markdown keeps their lines
    return markdown.replace(MARKER, diagrams)
