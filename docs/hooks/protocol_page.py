"""MkDocs hook: puts the diagrams of the message modules into explanation/protocol.md."""

import inspect

from distbelief.protocol import batch, groups, hosts, push_fetch, replication


MARKER = "<!-- the protocol's diagrams -->"
TITLES = {
    push_fetch: "Client and shard",
    replication: "Primary and backup of a shard",
    batch: "Sandblaster",
    groups: "Ranks of one replica",
    hosts: "Hosts",
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker by the docstrings; their drawings are indented, so they keep lines."""
    if MARKER not in markdown:
        return markdown
    parts = [f"## {title}\n\n{inspect.getdoc(module)}" for module, title in TITLES.items()]
    return markdown.replace(MARKER, "\n\n".join(parts))
