"""What every arrangement is compared with: the plain model of transformers, one row alone, eager attention, float32."""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_bridge.data.token_batch import TokenBatch
from tests.bridge.families.zoo import EOS, PAD, VOCABULARY

LENGTHS = (9, 17, 5, 17, 13, 2)
GROUPS = (0, 1, 2, 1, 1, 3)
PROMPTS = (3, 8, 2, 8, 8, 1)
"""Tokens of each row's prompt. The rows of a group begin with the same prompt."""

TOLERANCE = 1e-5
"""Largest difference over the largest number of the reference; of all gradients together, likewise by their norms."""
OF_ONE_GRADIENT = 1e-3
"""Of a single parameter's gradient, whose sum may cancel: over its largest number plus a thousandth of the largest."""


class Numbers(NamedTuple):
    """A number for each token (or row), zero where none counts, and the gradients of their weighted sum."""

    values: Tensor
    gradients: dict[str, Tensor]


def batch() -> TokenBatch:
    """Six rows of unlike lengths, three of them of one prompt; the padding token and the end token inside rows."""
    generator = torch.Generator().manual_seed(7)
    lengths, groups = torch.tensor(LENGTHS), torch.tensor(GROUPS)
    columns = torch.arange(int(lengths.max()))
    tokens = torch.randint(4, VOCABULARY, (len(LENGTHS), len(columns)), generator=generator)
    for row, group in enumerate(GROUPS):
        first = GROUPS.index(group)
        tokens[row, : PROMPTS[row]] = tokens[first, : PROMPTS[row]]
    tokens[:, 10], tokens[0, 4], tokens[:, 11] = PAD, PAD, EOS
    tokens = tokens.masked_fill(columns >= lengths[:, None], PAD)
    mask = (columns >= torch.tensor(PROMPTS)[:, None]) & (columns < lengths[:, None])
    mask[1, 12] = False
    return TokenBatch(tokens, mask, lengths, groups)


def weights(mask: Tensor) -> Tensor:
    """What each number is multiplied with in the sum whose gradients are compared."""
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(8)) * mask


def token_logprobs(model: PreTrainedModel, rows: TokenBatch) -> Tensor:
    """Log-probabilities of the tokens that count, [N, L], each row alone through the model's own forward."""
    found = []
    for tokens, length in zip(rows.tokens, rows.lengths.tolist(), strict=True):
        logits = model(input_ids=tokens[None, :length], use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:length, None])[:, 0]
        found.append(torch.nn.functional.pad(logprobs, (1, rows.tokens.shape[1] - length)))
    return torch.stack(found).masked_fill(~rows.mask, 0.0)


def numbers(model: PreTrainedModel, rows: TokenBatch) -> Numbers:
    """Log-probabilities and gradients; the model's own gradients are dropped before and after."""
    model.zero_grad()
    values = token_logprobs(model, rows)
    (values * weights(rows.mask)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Numbers(values.detach(), gradients)


def within_rounding(found: Mapping[str, float], model: PreTrainedModel, rows: TokenBatch) -> dict[str, float]:
    """The errors over the family's own rounding, float32 against float64, where that is more than the tolerance.

    Recurrences of large random weights lose digits in any order of their sums. More than 50 times the tolerance is
    never rounding.
    """
    if all(error <= 1.0 for error in found.values()):
        return dict(found)
    try:
        exact = numbers(copy.deepcopy(model).double(), rows)
    except RuntimeError:  # a model that names float32 itself
        return dict(found)
    wanted = Numbers(exact.values.float(), {name: g.float() for name, g in exact.gradients.items()})
    own = errors(numbers(model, rows), wanted)
    allowed = {part.split()[0]: min(max(1.0, 2.0 * size), 50.0) for part, size in own.items()}
    return {part: size / allowed.get(part.split()[0], 1.0) for part, size in found.items()}


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number, or over 1; a number that is none is infinitely wrong."""
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def errors(found: Numbers, wanted: Numbers) -> dict[str, float]:
    """Of the values, of all gradients, and of the parameter that is off most, each over its tolerance: ≤ 1 is right."""
    parts = {"values": error(found.values, wanted.values) / TOLERANCE}
    if missing := {name for name, g in wanted.gradients.items() if bool(g.any())} - found.gradients.keys():
        return parts | {f"no gradient of {min(missing)}": float("inf")}
    largest = max((float(g.abs().max()) for g in wanted.gradients.values()), default=0.0)
    difference, total, single = 0.0, 0.0, {"": 0.0}
    for name, gradient in found.gradients.items():
        other = wanted.gradients.get(name)
        other = torch.zeros_like(gradient) if other is None else other
        gap = (gradient - other).double()
        difference, total = difference + float(gap.square().sum()), total + float(other.double().square().sum())
        scale = float(other.abs().max()) + 1e-3 * largest
        single[name] = float(gap.abs().max()) / max(scale, 1e-12)
    worst = max(single, key=single.__getitem__)
    parts["gradients"] = (difference / max(total, 1e-12)) ** 0.5 / TOLERANCE
    return parts | {f"gradient of {worst}": single[worst] / OF_ONE_GRADIENT}
