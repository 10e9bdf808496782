"""jax.lax.top_k and rl_fn's row state, by XLA: what other backends are compared with. It holds every logit."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from rl_kernels.common.row_state import RowState
from rl_kernels.linear_logprobs import reference
from rl_kernels.logits_logprobs.reference import as_array, as_tensor, kept_set
from rl_kernels.topk_logprobs.largest import NOTHING


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    kept = None if allowed_tokens is None else kept_set(allowed_tokens, logits.shape[-1])
    found = _top_k(as_array(logits), kept, k)[1].to(logits.device)
    return found if mask is None else found.masked_fill(~mask[:, None], 0)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    k: int,
    start: int,
    workspace: int,
) -> tuple[RowState, Tensor, Tensor]:
    """State of the entries start, start + 1, … that ``weight`` holds, and the k largest logits with their ids; where
    there are fewer entries, −inf and the id of no entry. In rows left out the state of no entry.
    """
    no_tokens = torch.empty(len(hidden), 0, dtype=torch.int64)
    state = reference.forward(hidden, weight, bias, no_tokens, inverse, softcap, allowed_tokens, mask, start, workspace)
    kept = None if allowed_tokens is None else kept_set(allowed_tokens, start + len(weight))[:, start:]
    values, columns = _top_k(reference.logits(hidden, weight, bias), kept, min(k, len(weight)))
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=float("-inf")).to(inverse)
    return state, values, torch.nn.functional.pad(columns + start, missing, value=NOTHING).to(hidden.device)


def _top_k(z: jax.Array, kept: jax.Array | None, k: int) -> tuple[Tensor, Tensor]:
    # Comparing by == sees no difference between −0 and 0; top_k does, and it sees the sign of NaN.
    z = jnp.where(z == 0, 0.0, jnp.where(jnp.isnan(z), jnp.nan, z))
    values, columns = jax.lax.top_k(z if kept is None else jnp.where(kept, z, -jnp.inf), k)
    return as_tensor(values, torch.device("cpu")), torch.tensor(np.array(columns)).long()
