"""jax.lax.top_k and rl_fn's row state, by XLA: the definition that other backends are compared with, and holds
every logit."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.row_state import RowState
from rl_kernels.linear_logprobs import reference
from rl_kernels.logits_logprobs.reference import allowed_mask, as_array, as_tensor
from rl_kernels.topk_logprobs.largest import NO_TOKEN


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    allowed = None if allowed_tokens is None else allowed_mask(allowed_tokens, logits.shape[-1])
    found = _top_k(as_array(logits), allowed, k)[1].to(logits.device)
    return found if mask is None else found.masked_fill(~mask[:, None], 0)


def forward(problem: Problem, k: int, workspace: int) -> tuple[RowState, Tensor, Tensor]:
    """State of the weight's part of the vocabulary, and the k largest logits with their ids: −inf and ``NO_TOKEN``
    where there are fewer. In rows left out the empty state.
    """
    hidden, weight, bias, rows, start = problem
    state = reference.forward(problem, workspace)
    allowed = None
    if rows.allowed_tokens is not None:
        allowed = allowed_mask(rows.allowed_tokens, start + len(weight))[:, start:]
    values, columns = _top_k(reference.logits(hidden, weight, bias), allowed, min(k, len(weight)))
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=float("-inf")).to(rows.inv_temperature)
    return state, values, torch.nn.functional.pad(columns + start, missing, value=NO_TOKEN).to(hidden.device)


def _top_k(z: jax.Array, allowed: jax.Array | None, k: int) -> tuple[Tensor, Tensor]:
    # top_k orders −0 below 0, and NaN by its sign: neither is to be seen in the result.
    z = jnp.where(z == 0, 0.0, jnp.where(jnp.isnan(z), jnp.nan, z))
    values, columns = jax.lax.top_k(z if allowed is None else jnp.where(allowed, z, -jnp.inf), k)
    return as_tensor(values, torch.device("cpu")), torch.tensor(np.array(columns)).long()
