"""Two partial attentions of the same queries, over disjoint keys, as one."""

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Take a block's keys into ``out`` and ``lse``, in place.

    With w = sigmoid(block_lse − lse), the block's part of the softmax, out becomes (1 − w) · out + w · block_out. Every
    query has at least one key on both sides, so both logsumexps are finite.

    out, block_out: [T, H, D]. lse, block_lse: [T, H]. ``out`` and ``lse`` have the dtype to sum in.
    """
    weight = torch.sigmoid(block_lse - lse)[..., None].to(out.dtype)
    out.lerp_(block_out.to(out.dtype), weight)
    torch.logaddexp(lse, block_lse, out=lse)
