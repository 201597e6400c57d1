"""Nets over sequences: recurrent ones, torch's encoder, and two hand-written ones."""

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override


class LstmTagger(nn.Module):
    """A tag for each word, and a class for the sentence."""

    def __init__(self, *, n_words: int = 11, size: int = 6, n_tags: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, size, padding_idx=0)
        self.lstm = nn.LSTM(size, size, num_layers=2, batch_first=True)
        self.tags = nn.Linear(size, n_tags)
        self.sentence = nn.Linear(size, 2)

    @override
    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x, (hidden, _) = self.lstm(self.words(words))
        return {"tags": self.tags(x), "sentence": self.sentence(hidden[-1])}


class Dictation(nn.Module):
    """A GRU that begins with the last states of an LSTM in both directions, steps first."""

    def __init__(self, *, size: int = 3, n_units: int = 512) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, n_units, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * n_units, n_units)

    @override
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        states, (hidden, cells) = self.lstm(x)
        y, _ = self.gru(states.transpose(0, 1), hidden[1:])
        return {"y": y.transpose(0, 1), "cell": cells[0]}


class TorchEncoder(nn.Module):
    """`nn.TransformerEncoder` between an embedding and its transpose, with a shared tensor."""

    def __init__(
        self,
        *,
        n_words: int = 11,
        size: int = 8,
        n_positions: int = 5,
        norm_first: bool = False,
        causal: bool = False,
        padded: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, size)
        self.positions = nn.Embedding(n_positions + 2, size)
        layer = nn.TransformerEncoderLayer(
            *(size, 2, 12),
            dropout=dropout,
            batch_first=True,
            norm_first=norm_first,
            activation="gelu" if norm_first else "relu",
        )
        norm = nn.LayerNorm(size) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)
        self.causal = causal
        self.padded = padded
        self.head = nn.Linear(size, n_words, bias=False)
        self.head.weight = self.words.weight

    @override
    def forward(self, words: torch.Tensor) -> object:
        _, n_positions = words.shape
        assert n_positions <= self.positions.num_embeddings
        places = torch.arange(n_positions, device=words.device).unsqueeze(0)
        x = self.words(words) + self.positions(places)
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(
                n_positions, device=words.device, dtype=x.dtype
            )
        pads = words >= self.words.num_embeddings - 2 if self.padded else None
        x = self.encoder(x, mask=mask, src_key_padding_mask=pads)
        return self.head(x)


class Block(nn.Module):
    """Hand-written attention, and a gated feed-forward layer."""

    def __init__(self, size: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(size, eps=1e-6)
        self.norm2 = nn.RMSNorm(size, eps=1e-6)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size)
        self.gate = nn.Linear(size, 2 * size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.scale = nn.Parameter(0.5 * torch.ones(size))
        self.n_heads = n_heads

    @override
    def forward(self, x: torch.Tensor) -> object:
        n_samples, n_positions, size = x.shape
        q, k, v = (
            part.reshape(n_samples, n_positions, self.n_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(n_samples, n_positions, size)
        x = x + self.scale * self.out(y)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2020: patches, a class token, position embeddings."""

    def __init__(
        self, *, patch: int = 4, size: int = 8, n_patches: int = 4, n_classes: int = 3
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, patch, stride=patch)
        self.token = nn.Parameter(torch.ones(1, 1, size))
        self.positions = nn.Parameter(torch.ones(1, n_patches + 1, size))
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.norm = nn.LayerNorm(size)
        self.blocks = nn.Sequential(Block(size, 2), Block(size, 2))
        self.register_buffer("temperature", torch.full((), 2.0))
        self.head = nn.Linear(size, n_classes)

    @override
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        x = torch.cat((token, x), dim=1) + self.positions
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = self.blocks(x + y)
        return functional.log_softmax(self.head(x[:, 0]) / self.temperature, dim=-1)
