"""Misspelt words: what may have been meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final


SYNONYMS: Final = {
    "lr": "learning_rate",
    "eta": "learning_rate",
    "batch": "batch_size",
    "bs": "batch_size",
    "criterion": "loss",
    "loss_fn": "loss",
    "optim": "rule",
    "optimizer": "rule",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "workers": "replicas",
    "num_workers": "replicas",
    "world_size": "replicas",
    "servers": "shards",
    "args": "arguments",
    "kwargs": "arguments",
    "eps": "epsilon",
    "max_norm": "clip_norm",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "training": "algorithm",
    "dataset": "data",
    "network": "model",
    "output_dir": "directory",
}
"""What others call a thing, and what it is called here: letters alone do not tell."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the sentence that helps whoever wrote `word` instead of a known one."""
    known, word = list(known), word.lower()
    if SYNONYMS.get(word) in known:
        return f"Did you mean '{SYNONYMS[word]}'?"
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    begun = [name for name in known if name.startswith(word)]  # "tol" of "tolerance"
    if not near and len(begun) == 1:
        near = begun
    return f"Did you mean '{near[0]}'?" if near else f"It knows {', '.join(known)}."
