"""Results as HTML, for notebooks: what the terminal shows, and pictures."""

import io
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console


WIDTH: Final = 100  # characters of a line
_FORMAT: Final = '<pre style="line-height: normal; white-space: pre">{code}</pre>'


def html(show: Callable[[Console], object]) -> str:
    """Return what `show` prints, as HTML; its text can hold no markup."""
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, highlight=False, force_jupyter=False
    )
    show(console)
    return console.export_html(inline_styles=True, code_format=_FORMAT)


def picture(path: Path) -> str:
    """Return a PNG as HTML that contains it; "" if there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    return f'<img src="data:image/png;base64,{b64encode(content).decode()}" width="560">'
