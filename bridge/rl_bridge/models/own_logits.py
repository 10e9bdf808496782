"""A class of one's own is tried on one short row before anything is made of it: it gives logits, and always the same.

Sampling, scoring and training call a model in turn. Where the calls differ, every ratio is of two models; where the
numbers are probabilities, their softmax is nearly even. Both train without an error, and nobody learns why so badly.
"""

import math

import torch
from torch import Tensor, nn

from rl_bridge.common.random_numbers import drawing_from
from rl_bridge.parallel.drawn import SCALES, draw

TOKENS, CALLS = 9, 4
"""Length of the row, and how often it is read: what drifts from call to call may begin slowly."""
EXACT = 1e-3
"""Largest difference of two calls, of the spread of the logits."""
ROUNDED = 2e-2
"""How far sums of probabilities may be from 1, in bfloat16 too."""


def require_logits(module: nn.Module, name: str, tokens: int) -> None:
    """Refuse a class of which one row has other numbers in another call, or probabilities in place of logits.

    It reads the row with its own weights, and with drawn ones: behind a head of zeros nothing differs. Code that fails
    here, as where it needs another device, is told so when it is used.

    Args:
        module: a new one, in evaluation mode, which is dropped afterwards.
        tokens: how many ids there are.

    Raises:
        ValueError: with the name of the class and the likely cause.
    """
    length, blank = min(TOKENS, getattr(module, "max_positions", None) or TOKENS), True
    with torch.device("cpu"), drawing_from(0):  # where the module is, in whatever device context this is called
        ids = torch.randint(tokens, (1, length))
        for scale in (None, *SCALES):
            if scale is not None:
                draw(module, scale)
            numbers = _has_numbers(module, ids, name)
            blank = blank and numbers is False
            if numbers and scale is not None:
                break  # of a deep class the first scales may overflow
    if blank:
        raise ValueError(
            f"{name}.forward gives logits that are NaN or infinite for a row of {length} tokens, with its own weights "
            "and with others: its own computation does, as a division by 0, or a mask that hides a token from itself"
        )


def _has_numbers(module: nn.Module, ids: Tensor, name: str) -> bool | None:
    """Whether the numbers of the row are finite; then they are judged. None: the user's code raises."""
    before = {path: buffer.clone() for path, buffer in module.named_buffers()}
    try:
        with torch.no_grad():
            first, *_, last = (_logits(module, ids).float() for _ in range(CALLS))
        changed = [path for path, buffer in module.named_buffers() if not torch.equal(buffer, before[path])]
        with torch.enable_grad():
            learned = _logits(module, ids)
    except Exception:  # Whatever the user's code raises.
        return None
    if not learned.requires_grad and any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"{name}.forward gives logits without a gradient, so that nothing can be trained: it computes under "
            "torch.no_grad or torch.inference_mode, or detaches them (.detach(), .data)"
        )
    learned = learned.detach().float()
    numbers = first[first > -math.inf]  # what pads a vocabulary may be −inf in every call
    if not (numbers.numel() and all(x[x != -math.inf].isfinite().all() for x in (first, last, learned))):
        return False
    allowed = EXACT * float(numbers.std()) + 1e-6
    if (gap := _gap(first, last)) > allowed:
        cause = (
            f"calls change its buffer {changed[0]!r}, which training alone may do (if self.training)"
            if changed
            else "it keeps something from call to call, or draws random numbers in evaluation, as functional.dropout "
            "does without training=self.training"
        )
        raise ValueError(f"{name} gives other logits for the same row when it is called again, by {gap:.2g}: {cause}")
    if (gap := _gap(last, learned)) > allowed:
        raise ValueError(
            f"{name} gives other logits where gradients are computed than under torch.no_grad, by {gap:.2g}: another "
            "model would be trained than is sampled and scored"
        )
    if bool((first >= 0).all()) and float((first.sum(-1) - 1).abs().max()) < ROUNDED:
        raise ValueError(
            f"{name} gives what look like probabilities: no number is below 0, and those of each token add up to 1. "
            "forward returns logits, before the softmax; log-probabilities are logits, too"
        )
    return True


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where other tokens are −inf."""
    numbers = one != -math.inf
    if not torch.equal(numbers, other != -math.inf):
        return math.inf
    return float((one - other)[numbers].abs().max())


def _logits(module: nn.Module, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])[None]
    return module(input_ids=ids, position_ids=positions, attention_mask=None)
