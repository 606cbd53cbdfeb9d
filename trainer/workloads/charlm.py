"""A small GPT that learns to write Python's documentation, letter by letter.

The text comes with every CPython: `pydoc_data.topics`, what `help()` shows, about 460 kB. Each topic is cut into
pieces of at most `context` letters; the last one of a topic is shorter, so batches are padded, and the
loss is the mean over the letters that are there (`train.loss_mean = "tokens"`).
Every tenth piece is held out. At the end, a sample of what the model writes goes into the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from trainer.config import Config

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
"""All that the model can read and write; what is not among them is read as `?`."""
CODES = {letter: code for code, letter in enumerate(LETTERS)}
HELD_OUT_EVERY = 10
NOTHING = -100
"""The target of a place in the padding, which cross_entropy leaves out."""


@dataclass(frozen=True)
class Options:
    """`[workload.options]` of this workload."""

    context: int = 128
    """Letters that the model looks at."""

    width: int = 96
    """Features of a letter; a multiple of `heads`."""

    heads: int = 4
    """Attention heads of a block."""

    blocks: int = 3
    """Blocks of attention and feed-forward layers."""

    dropout: float = 0.0
    """Share of the features that is dropped at the end of each layer, in training."""

    sample: int = 300
    """Letters of the sample that is written at the end."""


def encode(text: str) -> Tensor:
    return torch.tensor([CODES.get(letter, CODES["?"]) for letter in text])


def decode(codes: Tensor) -> str:
    return "".join(LETTERS[code] for code in codes.tolist())


class Pieces(torch.utils.data.Dataset[Tensor]):
    """Pieces of text as codes [2 to context + 1]: each letter is the target of those before it."""

    def __init__(self, context: int, split: str) -> None:
        pieces = [piece for name in sorted(topics) for piece in encode(topics[name]).split(context + 1)
                  if len(piece) > 1]
        held_out = split == "validation"
        self.pieces = [piece for i, piece in enumerate(pieces)
                       if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        self.lengths = [len(piece) - 1 for piece in self.pieces]
        """Letters to predict in each, for `data.bucket_batches`."""

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        piece: Tensor = self.pieces[index]
        return piece


class Block(nn.Module):
    """Attention to the letters before, then a feed-forward layer; each added to what came in."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[N, length, width] -> the same shape."""
        n, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(n, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        # Causal, so what stands in the padding, always at the end, is seen by no letter before it.
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(n, length, width)))
        added: Tensor = x + self.dropout(self.feed_forward(self.before_forward(x)))
        return added


class Embedding(nn.Module):
    """Which letter, and at which place."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(context, width)

    def forward(self, codes: Tensor) -> Tensor:
        """[N, length] -> [N, length, width]."""
        embedded: Tensor = self.letters(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        return embedded


def build_model(config: Config) -> nn.Module:
    """Codes [N, length] -> logits of the next letter [N, length, letters]. A Sequential, so any strategy can cut it."""
    options = Options(**config.workload.options)
    model = nn.Sequential(Embedding(options.context, options.width), *(Block(options) for _ in range(options.blocks)),
                          nn.LayerNorm(options.width), nn.Linear(options.width, len(LETTERS)))
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)  # GPT-2's
    return model


def build_dataset(config: Config, split: str) -> Pieces:
    return Pieces(Options(**config.workload.options).context, split)


def collate(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Codes padded to the longest piece [N, longest], and the letter after each, NOTHING in the padding."""
    return {"codes": pad_sequence([piece[:-1] for piece in pieces], batch_first=True),
            "targets": pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=NOTHING)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Sum of the cross-entropies over the letters, in nats, and how many there are."""
    targets = batch["targets"]
    logits = model(batch["codes"]).float()
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="sum")
    return total, int((targets != NOTHING).sum()), {"accuracy": (logits.argmax(2) == targets).sum()}


@torch.no_grad()
def finish(model: nn.Module, config: Config) -> str:
    """What the model writes after a line break, drawn from its own probabilities; the same for the same weights."""
    options = Options(**config.workload.options)
    generator = torch.Generator().manual_seed(config.run.seed)
    device = next(model.parameters()).device
    codes = encode("\n")
    for _ in range(options.sample):
        logits = model(codes[-options.context:].unsqueeze(0).to(device))[0, -1].float()
        codes = torch.cat([codes, torch.multinomial(logits.softmax(0).cpu(), 1, generator=generator)])
    return decode(codes[1:])
