"""GPT-2 of transformers on the text of Python's own documentation, letter by letter.

    distbelief train experiments/zoo/gpt2.toml
    python -m experiments.baseline experiments/zoo/gpt2.toml     # the same in one process

The help topics come with Python; nothing is downloaded.
"""

from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.zoo.models import Scores, library


HELD_OUT_ONE_IN = 10
N_LETTERS = 128  # those of ASCII


def gpt2(*, layers: int = 2, width: int = 64, heads: int = 4, length: int = 64) -> nn.Module:
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=N_LETTERS,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        use_cache=False,
    )
    return Scores(transformers.GPT2LMHeadModel(config), ["input_ids"])


def passages(*, part: str, length: int = 64) -> TensorDataset:
    """Return passages of so many letters, and for each letter the next; every tenth is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    letters = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    n = (len(letters) - 1) // length
    inputs = letters[: n * length].view(n, length)
    targets = letters[1 : n * length + 1].view(n, length)
    held_out = torch.arange(n) % HELD_OUT_ONE_IN == 0
    chosen = held_out if part == "test" else ~held_out
    return TensorDataset(inputs[chosen], targets[chosen])
