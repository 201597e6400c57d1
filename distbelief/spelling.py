"""Misspelt words: what may have been meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the sentence that helps whoever wrote `word` instead of a known one."""
    known, word = list(known), word.lower()
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    begun = [name for name in known if name.startswith(word)]  # "tol" of "tolerance"
    if not near and len(begun) == 1:
        near = begun
    return f"Did you mean '{near[0]}'?" if near else f"It knows {', '.join(known)}."
