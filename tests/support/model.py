"""The small decoder-like model that the tests train."""

import torch
from torch import nn


class Block(nn.Module):
    """A norm, two square and two four-fold linear layers; `w1` and `w2` are what tensor parallel splits."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.wo(self.wq(self.norm(hidden)))
        return hidden + self.w2(torch.relu(self.w1(inner)))


class Decoder(nn.Module):
    """Tokens `[batch, time]` to logits `[batch, time, vocabulary]`."""

    def __init__(self, layers: int, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
