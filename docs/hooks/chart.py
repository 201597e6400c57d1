"""MkDocs hook: draws the table behind a mark as bars, in the mark's place.

Figures are those of the table, one number in a cell. The line is at 1: as fast as what the
page compares with.
"""

import re
from html import escape


MARK = "<!-- a chart of the next table -->\n"
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
LABELS, BARS, ROW = 250, 340, 15  # extents; one row for each figure
BAR = f'height="{ROW - 5}" fill="currentColor" opacity="0.4"'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the mark, if the page has it (called by MkDocs for each page)."""
    before, mark, after = markdown.partition(MARK)
    table = TABLE.search(after)
    if not mark or table is None:
        return markdown
    head, _line, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table[0].splitlines()
    ]
    numbers = {row[0]: [float(cell.strip("*")) for cell in row[1:]] for row in rows}
    return before + chart(head[1:], numbers) + after


def chart(columns: list[str], rows: dict[str, list[float]]) -> str:
    most = max(max(row) for row in rows.values())
    scale, height = BARS / most, len(rows) * (len(columns) + 1) * ROW
    parts = []
    for index, (label, row) in enumerate(rows.items()):
        top = index * (len(columns) + 1) * ROW
        parts.append(f'<text x="0" y="{top + ROW - 2}">{escape(label)}</text>')
        for below, (column, number) in enumerate(zip(columns, row, strict=True), start=1):
            y = top + below * ROW
            parts += [
                f'<rect x="{LABELS}" y="{y + 3}" width="{number * scale:.0f}" {BAR}/>',
                f'<text x="{LABELS - 8}" y="{y + 12}" text-anchor="end">{column}</text>',
                f'<text x="{LABELS + BARS + 8}" y="{y + 12}">{number:.2f}</text>',
            ]
    line = f'x1="{LABELS + scale:.0f}" x2="{LABELS + scale:.0f}" y1="0" y2="{height}"'
    parts.append(f'<line {line} stroke="currentColor" stroke-dasharray="3 3"/>')
    size = f'viewBox="0 0 {LABELS + BARS + 110} {height + 4}" style="min-width: 36rem"'
    drawn = f'<svg role="img" {size} font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    return f'<div style="overflow-x: auto">{drawn}</div>\n\n'
