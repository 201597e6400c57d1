"""MkDocs hook: puts the diagrams of the message module into explanation/protocol.md."""

import distbelief.messages as protocol


MARKER = "<!-- the protocol's diagrams -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker by the module's docstring (called for each page)."""
    if MARKER not in markdown:
        return markdown
    assert protocol.__doc__ is not None
    return markdown.replace(MARKER, f"```text\n{protocol.__doc__.strip()}\n```")
