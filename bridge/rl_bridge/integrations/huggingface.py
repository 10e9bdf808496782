"""Log-probabilities of a Hugging Face causal language model without its logits."""

import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_bridge.parallel.heads import head_options, of_targets
from rl_kernels import TokenLogprobs


def token_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    allowed_tokens: Tensor | None = None,
    backend: str | None = None,
    **inputs: Any,
) -> TokenLogprobs:
    """Log-probability of each token after the first, entropy and logsumexp of its distribution; the logits never exist.

    Position t of the result, of T − 1, belongs to ``input_ids[:, t + 1]``.

    Args:
        model: a causal language model; its head and its backbone are looked up at each call, so PEFT may have wrapped
            them. Under FSDP2 call the model's method instead (see fuse_linear_logprobs).
        input_ids: ``[B, T]``.
        mask: bool ``[B, T − 1]``: the tokens that count; the others are not computed and have results 0.
        temperature: a number, or ``[B, T − 1]``.
        allowed_tokens: ids that a truncated sampler allowed, ``[B, T − 1, S]``, with −1 for shorter sets.
        backend: of ``rl_kernels.linear_logprobs``.
        **inputs: of the model: attention_mask, position_ids, …
    """
    options = {"temperature": temperature, "softcap": None, "mask": mask}
    options |= {"allowed_tokens": allowed_tokens, "backend": backend}
    return of_targets(model, input_ids, input_ids[:, 1:], options, inputs)


def fuse_linear_logprobs(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model a method ``token_logprobs``, once it is shown to agree with the model's own logits.

    A model whose head does something this module does not know of is refused: ValueError with the difference found.
    For FSDP2: fuse, ``fully_shard(model)``, then ``register_fsdp_forward_method(model, "token_logprobs")``, which has
    FSDP gather the weights before the method and average their gradients after it.
    """
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    ids = torch.randint(vocabulary, (2, 5), generator=torch.Generator().manual_seed(0)).to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            expected = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            fused = token_logprobs(model, ids).logprobs
    finally:
        model.train(training)
    difference = (fused - expected).abs().max().item()
    # A model computing in half precision rounds the logits that the fused way does not.
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    limit = 1e-4 if exact else 0.02 * max(1.0, logits.abs().max().item())
    if not difference <= limit:
        raise ValueError(
            f"{type(model).__name__}: fused log-probabilities differ from the model's own by {difference:.3g}; "
            f"its head does more than scale and softcap {head_options(model)}"
        )
    # Not a parameter and not a module: past nn.Module's own __setattr__.
    object.__setattr__(model, "token_logprobs", types.MethodType(token_logprobs, model))
    return model
