"""rl_fn's formula, run by XLA: the answer every other backend is compared with."""

import jax.numpy as jnp
import numpy as np
import torch

import rl_fn


def run(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float | torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values only: a tensor that needs a gradient is refused."""
    if logits.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("backend 'reference' gives no torch gradient; available with one: torch")
    array = jnp.asarray(logits.detach().float().cpu().numpy())
    scale = jnp.asarray(temperature.detach().cpu().numpy()) if isinstance(temperature, torch.Tensor) else temperature
    result = rl_fn.logits_logprobs(array, jnp.asarray(tokens.cpu().numpy()), temperature=scale, softcap=softcap)
    logprobs, entropy, logsumexp = (torch.tensor(np.array(value), device=logits.device) for value in result)
    return logprobs, entropy, logsumexp
