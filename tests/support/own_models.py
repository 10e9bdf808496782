"""Model classes as a user writes them: right ones, and ones with a fault of each kind."""

import torch
from torch import nn
from torch.nn.functional import conv1d, dropout, linear, pad, scaled_dot_product_attention

from rl_bridge.models.small import character_tokenizer

ALPHABET = "0123456789+="
TOKENS = len(ALPHABET) + 2


def tokenizer():
    return character_tokenizer(ALPHABET)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask, causal):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Tiny(nn.Module):
    """Tied embeddings, a table that is not stored, dropout that evaluation has to switch off."""

    reads_mask = reads_positions = causal = True
    max_positions = 64

    def __init__(self, width=16, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(layers))
        turns = torch.arange(self.max_positions)[:, None] * torch.arange(1, width + 1) * 0.3
        self.register_buffer("places", turns.sin(), persistent=False)

    def forward(self, input_ids, position_ids, attention_mask=None):
        if not self.reads_positions:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = dropout(self.tokens(input_ids) + self.places[position_ids], 0.5, self.training)
        for layer in self.layers:
            x = layer(x, attention_mask if self.reads_mask else None, self.causal)
        return linear(x, self.tokens.weight)


class NoMask(Tiny):
    """Packed documents see each other."""

    reads_mask = False


class NoPositions(Tiny):
    """The second of two packed documents stands where the first ended."""

    reads_positions = False


class BothWays(Tiny):
    """A token sees those behind it, which are padding."""

    causal = False


class RunningMean(nn.Module):
    """No attention: each token reads the mean of all tokens before it in the row."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, input_ids, position_ids, attention_mask=None):
        x = self.tokens(input_ids)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.head(x + x.cumsum(1) / counts)


class Bigram(nn.Module):
    """No token but the last counts."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, TOKENS)

    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.table(input_ids)


class Untied(Tiny):
    """A head of its own, which may start at zero."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, TOKENS, bias=False)

    def forward(self, input_ids, position_ids, attention_mask=None):
        if not self.reads_positions:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.tokens(input_ids) + self.places[position_ids]
        for layer in self.layers:
            x = layer(x, attention_mask if self.reads_mask else None, self.causal)
        return self.head(self.mixed(x))

    def mixed(self, x):
        return x


class UntiedNoMask(Untied):
    reads_mask = False


class UntiedNoPositions(Untied):
    reads_positions = False


class UntiedBothWays(Untied):
    causal = False


class Convolved(Untied):
    """Each token reads the three before it in the row, whosever they are."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.rand(16, 1, 4) - 0.5)

    def mixed(self, x):
        return x + conv1d(pad(x.transpose(1, 2), (3, 0)), self.taps, groups=16).transpose(1, 2)


class OfLongRows(Untied):
    """A row's numbers depend on how long the row is with its padding, beyond 20 tokens."""

    def mixed(self, x):
        return x * max(1.0, x.shape[1] / 20)


class TurnedByColumn(Untied):
    """Distances are those of columns: right for packed documents, wrong behind a prefix that others lie behind."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, input_ids, position_ids, attention_mask=None):
        x = self.tokens(input_ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        columns, pairs = (torch.arange(count, device=x.device, dtype=x.dtype) for count in (x.shape[1], 8))
        q, k = (turned(y, columns[:, None] * 0.5**pairs) for y in (q, k))
        y = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
        return self.head(x + self.out(y[:, 0]))


def turned(x, turns):
    left, right = x.chunk(2, -1)
    return torch.cat([left * turns.cos() - right * turns.sin(), left * turns.sin() + right * turns.cos()], -1)


class Overflowing(Untied):
    """Numbers are none with a head of normal weights: the class's own are uniform."""

    def mixed(self, x):
        uniform = self.head.weight.abs().max() < 2 * self.head.weight.std()
        return torch.where(uniform, x, torch.full_like(x, torch.nan))


def started(kind, start):
    """The class with weights of another start: "zero" for its head and what is added to the stream, or "small"."""

    def __init__(self):
        kind.__init__(self)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if start == "zero" and any(word in name for word in ("out", "head", "taps")):
                    parameter.zero_()
                elif start == "small" and parameter.ndim > 1:
                    parameter.mul_(0.02 / parameter.std())

    return type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": kind.__doc__})
