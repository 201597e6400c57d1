"""Two small tasks with real data: the next letter of a text, and phone states of speech."""

from functools import cache

import torch
from torch import nn

from experiments.figures import task as speech
from experiments.figures.task import Held
from experiments.speech.model import acoustic_net
from experiments.zoo.text import N_LETTERS, passages


CONTEXT = 16  # letters
N_HELD_OUT = 4096
_PASSAGE = 256  # letters; every tenth is held out


def text_net() -> nn.Module:
    """Return a net that predicts the next letter from 16; 85,376 parameters."""
    return nn.Sequential(
        nn.Embedding(N_LETTERS, 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, N_LETTERS),
    )


def speech_net() -> nn.Module:
    """Return 440 - 128 - 210 with ReLU; 83,538 parameters."""
    return acoustic_net(hidden=[128], states=speech.N_STATES, activation="relu")


@cache
def text(part: str) -> Held:
    """Return 16 letters and the next, of Python's documentation."""
    letters, following = passages(part=part, length=_PASSAGE).tensors
    inputs = letters.unfold(1, CONTEXT, 1).reshape(-1, CONTEXT)
    targets = following[:, CONTEXT - 1 :].reshape(-1)
    if part == "test":
        chosen = torch.linspace(0, len(targets) - 1, N_HELD_OUT).long()
        inputs, targets = inputs[chosen], targets[chosen]
    return Held(inputs, targets)


def frames(part: str) -> Held:
    return speech.train() if part == "train" else speech.held_out()
