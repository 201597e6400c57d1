"""MkDocs hook: the site loads nothing from another server, or it is not built."""

import re


LOADED = re.compile(r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* href="https?:')


def on_post_page(output: str, page: object, **_: object) -> str:
    """Refuse a page that needs the network (called by MkDocs for each page)."""
    found = LOADED.search(output)
    if found is not None:
        raise ValueError(f"{page}: loads {output[found.start() :][:120]!r}")
    return output
