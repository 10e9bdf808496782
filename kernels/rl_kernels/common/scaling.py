"""From raw logits to those of the distribution: softcap, then logit scale over temperature, then the allowed tokens."""

import torch
from torch import Tensor


def scaled(logits: Tensor, inv_temperature: Tensor, softcap: float | None, allowed: Tensor | None = None) -> Tensor:
    """x = softcap·tanh(z/softcap)·inv_temperature; −inf where z is −inf or the token is not allowed. A new tensor."""
    z = logits.to(inv_temperature.dtype)
    if softcap is None:
        x = z * inv_temperature[:, None]
    else:
        x = torch.tanh(z / softcap).mul_(softcap).mul_(inv_temperature[:, None])
        # tanh turns an excluded −inf into a finite −softcap: an excluded token stays excluded.
        x = x.masked_fill_(z == float("-inf"), float("-inf"))
    return x if allowed is None else x.masked_fill_(~allowed, float("-inf"))


def slope(x: Tensor, inv_temperature: Tensor, softcap: float | None) -> Tensor | float:
    """dx/dz at scaled logits x (any shape [R, …]); where x is −inf the value is finite and means nothing."""
    inv_temperature = inv_temperature[:, None]
    if softcap is None:
        return inv_temperature
    capped = (x / (inv_temperature * softcap)).masked_fill_(x == float("-inf"), 1.0)
    return inv_temperature * (1.0 - capped * capped)
