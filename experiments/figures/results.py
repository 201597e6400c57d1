"""Where runs are kept, so that a figure can be drawn again, or gone on with."""

from pathlib import Path
from typing import Final


FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "results"
