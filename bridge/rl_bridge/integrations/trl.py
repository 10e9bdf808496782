"""TRL's log-probabilities and entropies by our kernels: ``patch()`` before training, ``unpatch()`` to undo it.

GRPO, RLOO and their kin compute them from hidden states (`ChunkedLogProbFunction`), other trainers from logits
(`selective_log_softmax`, `entropy_from_logits`, `selective_log_softmax_and_entropy`). Both ways are replaced.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_kernels import linear_logprobs, logits_logprobs

CHECKED = ("1.16.0",)
_FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")
_replaced: list[tuple[Any, str, Any]] = []


def patch(*, backend: str | None = None) -> None:
    """Replace TRL's functions in every TRL module that has them by name. Doing it twice changes nothing.

    Raises:
        NotImplementedError: TRL has a version that this was not checked with.
        ImportError: TRL is not installed.
    """
    if _replaced:
        return
    import trl  # pyright: ignore[reportMissingImports]
    import trl.trainer.utils as utils  # pyright: ignore[reportMissingImports]

    if trl.__version__ not in CHECKED:
        raise NotImplementedError(
            f"TRL {trl.__version__} was not checked with this patch, which replaces functions by name; "
            f"checked: {', '.join(CHECKED)}"
        )
    new = {name: _ours(name, backend) for name in _FUNCTIONS}
    old = {name: getattr(utils, name) for name in _FUNCTIONS}
    for module in [m for name, m in sys.modules.items() if m is not None and name.split(".")[0] == "trl"]:
        for name in _FUNCTIONS:
            # A module that did `from .utils import name` holds the function under that name itself.
            if module.__dict__.get(name) is old[name]:
                _replace(module, name, new[name])
    _replace(utils, "_ChunkedLogProbFunction", _fused(utils._ChunkedLogProbFunction, backend))


def unpatch() -> None:
    """Put TRL's own functions back."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def _replace(module: Any, name: str, value: Any) -> None:
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, value)


def _fused(original: Any, backend: str | None) -> type:
    """A stand-in for TRL's autograd function: its ``apply`` with ours inside."""

    class LinearLogprobs:
        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            labels: Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None,
            logit_scale: float,
            outputs: tuple[str, ...],
        ) -> tuple[Tensor | None, ...]:
            if not set(outputs) <= {"log_probs", "entropy"}:
                # Squared probabilities, mean logits and argmax hits are not what our kernels compute.
                return original.apply(
                    hidden, weight, bias, labels, temperature, chunk_size, softcap, logit_scale, outputs
                )
            out = linear_logprobs(
                hidden,
                weight,
                labels,
                bias=bias,
                temperature=temperature,
                logit_scale=logit_scale,
                softcap=softcap,
                backend=backend,
            )
            return out.logprobs, out.entropy if "entropy" in outputs else None, None, None, None

    return LinearLogprobs


def _ours(name: str, backend: str | None) -> Callable[..., Any]:
    """The replacement of one of TRL's functions, with its signature."""

    def both(logits, index, temperature, row_mask):
        if temperature <= 0:
            raise ValueError("temperature must be positive")
        several = index.dim() == logits.dim()
        mask = None if row_mask is None else row_mask != 0
        if mask is not None and several:
            raise ValueError(f"row_mask has the shape of the rows, {tuple(logits.shape[:-1])}, where index has K a row")
        out = logits_logprobs(logits, index, temperature=float(temperature), mask=mask, backend=backend)
        # TRL returns the dtype of the logits; ours are float32 inside and are rounded once, here.
        return out.logprobs.to(logits.dtype), out.entropy.to(logits.dtype)

    def selective_log_softmax(logits, index, temperature=1.0, row_mask=None):
        return both(logits, index, temperature, row_mask)[0]

    def entropy_from_logits(logits, chunk_size=128):
        index = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        return both(logits, index, 1.0, None)[1]

    def selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None):
        logprobs, entropy = both(logits, index, temperature, row_mask)
        return logprobs, entropy if entropy_requires_grad else entropy.detach()

    return {
        "selective_log_softmax": selective_log_softmax,
        "entropy_from_logits": entropy_from_logits,
        "selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
    }[name]
