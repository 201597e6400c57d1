"""MkDocs hook: shows pictures that programs in experiments/ draw, uncopied."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[2]
FIGURES = {
    "images/demo.png": "experiments/speech/demo.png",
    "images/plan.png": "experiments/images/plan.png",
    "images/figure3.png": "experiments/figures/figure3.png",
    "images/figure4.png": "experiments/figures/figure4.png",
    "images/figure5.png": "experiments/figures/figure5.png",
}


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 -- MkDocs is untyped here
    """Add the pictures to the site's files (called by MkDocs once)."""
    for name, source in FIGURES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files
