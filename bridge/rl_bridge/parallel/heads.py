"""Log-probabilities and values of tokens from hidden states and a head, wherever parallelism has put these."""

import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from rl_bridge.parallel.fsdp import fsdp_parameters, reshard_without_backward
from rl_bridge.weights.manifest import is_peft, without_peft
from rl_kernels import TokenLogprobs, linear_logprobs, linear_policy_loss, logits_logprobs

# Log-probabilities from hidden states and the output embeddings, wherever parallelism has put these.

HeadKind = Literal["linear", "logits"]
"""Log-probabilities from hidden states and the output embeddings, or from the logits of the model's own forward."""


class GivesLogits(PreTrainedModel):
    """A causal language model that is known by its logits alone: neither its head nor its hidden states are."""

    def remade(self) -> "GivesLogits":
        """A new model of the class in float32, on the CPU; the program's random state stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} does not say how another one is made")


class HeadOptions(NamedTuple):
    """The steps of a model from hidden @ weight.T + bias to its logits."""

    logit_scale: float
    softcap: float | None


class Head(NamedTuple):
    """Output embeddings of this process: all rows, or a slice of the vocabulary that ``group`` has the rest of."""

    weight: Tensor
    bias: Tensor | None
    start: int
    group: dist.ProcessGroup | None


def is_language_model(model: nn.Module) -> bool:
    """Whether the model, plain or of peft, predicts tokens; else it is a classifier."""
    inner = cast(PreTrainedModel, without_peft(model))
    return isinstance(inner, GivesLogits) or inner.get_output_embeddings() is not None


def head_options(model: PreTrainedModel) -> HeadOptions:
    """Scale and softcap of the model's logits, by the names that configurations have for them."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse; Falcon-H1
        scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        # Granite and MiniCPM divide by it, HyperCLOVA X multiplies.
        scale *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return HeadOptions(scale, next((cap for cap in caps if cap), None))


def head_of(model: PreTrainedModel) -> Head:
    """The output embeddings, which are looked up at each call: FSDP and PEFT exchange them.

    Raises:
        ValueError: no output embeddings; or FSDP holds them and has not gathered them.
    """
    module = cast(PreTrainedModel, without_peft(model)).get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: it is no causal language model")
    weight, bias = module.weight, getattr(module, "bias", None)
    if isinstance(weight, DTensor) and any(record.sharded_param is weight for record in fsdp_parameters(model)):
        # Gathered here, its gradient would be that of this rank's batch alone: FSDP must do it, and sum.
        raise ValueError(
            "FSDP has not gathered the output embeddings: call the model's own token_logprobs after "
            "fuse_linear_logprobs(model), fully_shard(model), register_fsdp_forward_method(model, 'token_logprobs')"
        )
    if is_peft(model):
        from rl_bridge.weights.adapters import effective_weight

        weight = effective_weight(module)
    if not isinstance(weight, DTensor):
        return Head(weight, bias, 0, None)
    mesh = weight.device_mesh
    if weight.placements != (Shard(0),):
        return Head(weight.full_tensor(), bias.full_tensor() if isinstance(bias, DTensor) else bias, 0, None)
    start = min(-(-weight.shape[0] // mesh.size()) * mesh.get_local_rank(), weight.shape[0])
    return Head(weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias, start, mesh.get_group())


def token_logprobs(
    model: PreTrainedModel,
    ids: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = True,
    mask: Tensor | None = None,
    allowed_tokens: Tensor | None = None,
    backend: str | None = None,
    head: HeadKind = "linear",
    **forward_kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of ``targets[b, t]`` after ``ids[b, : t + 1]``, and the entropy there; the logits never exist.

    log_softmax(softcap·tanh(logits/softcap)/temperature) is taken in float32, whatever the model computes in. All ranks
    of a mesh call the function; tensor-parallel ranks give the same rows, and all get every result.

    Args:
        model: a causal language model, plain, of peft, after ``parallelize``, or under autocast.
        ids: ``[B, T]``.
        targets: ``[B, T]``.
        temperature: a positive number, or ``[B, T]``.
        softcap: of the logits, for a model that has none of its own (Gemma has).
        entropy: False returns None in its place.
        mask: bool ``[B, T]``; where False nothing is computed beyond the hidden state, and results are 0.
        allowed_tokens: ids that a truncated sampler allowed, ``[B, T, S]``, with −1 for shorter sets.
        backend: of ``rl_kernels.linear_logprobs``.
        head: "logits" for a model that does more to hidden states than a product, a scale and a cap: its own forward
            gives the logits then, all at once.
        **forward_kwargs: of the model: attention_mask, position_ids, …

    Returns:
        (log-probabilities ``[B, T]``, entropies ``[B, T]`` or None), float32.

    Raises:
        ValueError: a softcap for a model that has its own, a model without output embeddings.
    """
    options = {"temperature": temperature, "softcap": softcap, "mask": mask}
    options |= {"allowed_tokens": allowed_tokens, "backend": backend, "head": head}
    result = _gathered(model, of_targets, ids, targets, options, forward_kwargs)
    return result.logprobs, result.entropy if entropy else None


def token_loss(
    model: PreTrainedModel,
    ids: Tensor,
    targets: Tensor,
    loss: Callable[..., Any],
    *,
    rows: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """A token-local loss of what ``token_logprobs`` returns, and its metrics; each logit is computed once.

    Args:
        model, ids: as for ``token_logprobs``; neither the vocabulary nor the tokens are cut over ranks.
        targets: ``[*batch]``, in the order of the hidden states that ``rows`` returns.
        loss: of ``rl_kernels.linear_policy_loss(fused=True)``.
        rows: puts hidden states ``[B, T, H]`` in the targets' order, ``[*batch, H]``.
        **options: temperature, softcap, mask and allowed_tokens of the targets; all others are the model's.
    """
    head = {name: options.pop(name, None) for name in ("softcap", "mask", "allowed_tokens")}
    head |= {"temperature": options.pop("temperature", 1.0), "loss": loss, "rows": rows}
    return _gathered(model, of_targets, ids, targets, head, options)


def of_targets(
    model: PreTrainedModel, ids: Tensor, targets: Tensor, options: dict[str, Any], forward_kwargs: dict[str, Any]
) -> Any:
    """Log-probabilities of ``token_logprobs`` and ``token_loss``, once the weights are gathered.

    Without ``rows`` the targets may be shorter than ``ids``.
    """
    options = dict(options)
    loss, rows, kind = (options.pop(name, None) for name in ("loss", "rows", "head"))
    inner = cast(PreTrainedModel, without_peft(model))
    scale, softcap = head_options(inner)
    if options["softcap"] is not None and softcap is not None:
        raise ValueError(
            f"{type(model).__name__} caps its logits at {softcap}: it takes no softcap of {options['softcap']} besides"
        )
    forward_kwargs = {"use_cache": False, **forward_kwargs}
    if kind == "logits":
        return _of_logits(inner, ids, targets, options, forward_kwargs)
    trunk = inner.base_model(input_ids=ids, **forward_kwargs)
    hidden = trunk.last_hidden_state[:, : targets.shape[1]] if rows is None else rows(trunk.last_hidden_state)
    weight, bias, start, group = head_of(model)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        # The head is a matrix product like the others.
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    options = options | {"softcap": softcap if options["softcap"] is None else options["softcap"]}
    options |= {"bias": bias, "logit_scale": scale, "start": start, "group": group}
    if loss is not None:
        total, metrics = linear_policy_loss(hidden, weight, targets, loss, fused=True, **options)
        return total.clone(), metrics
    result = linear_logprobs(hidden, weight, targets, **options)
    # FSDP2 hangs its hook on what leaves here, and warns of views: a change in place would go round it.
    return TokenLogprobs(*(value.clone() for value in result))


def _of_logits(
    inner: PreTrainedModel, ids: Tensor, targets: Tensor, options: dict[str, Any], forward_kwargs: dict[str, Any]
) -> TokenLogprobs:
    """The same from the model's own logits, [B, T, V], which have its scale and its cap."""
    # Not a call: FSDP's hooks of the root have run.
    logits = inner.forward(input_ids=ids, **forward_kwargs).logits[:, : targets.shape[1]]
    result = logits_logprobs(logits, targets, **{name: value for name, value in options.items() if name != "backend"})
    return TokenLogprobs(*(value.clone() for value in result))


# One number for each token, from hidden states and a linear head, wherever parallelism has put these.


def token_values(model: PreTrainedModel, ids: Tensor, **forward_kwargs: Any) -> Tensor:
    """The head's number after each token, [B, T] float32. All ranks of a mesh call the function.

    Args:
        model: a ``*ForSequenceClassification`` with one label, plain or peft's, parallel or not, under autocast or not.
        ids: [B, T].
        **forward_kwargs: of the model: attention_mask, position_ids, …
    """
    return _gathered(model, of_ids, ids, forward_kwargs)


def scored_places(model: PreTrainedModel, ids: Tensor, lengths: Tensor) -> Tensor:
    """Where the classifiers of transformers read a row's score: at its last token that is not the model's padding.

    Args:
        model: whose configuration names the pad token. Without one it is the last token.
        ids: [B, T], rows with padding of any kind on the right.
        lengths: [B] tokens of each row.

    Returns:
        [B]; 0 of a row of padding alone.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    counted = places < lengths[:, None]
    pad = model.config.get_text_config().pad_token_id
    if pad is not None:
        counted = counted & (ids != pad)
    return (places * counted).amax(1)


def of_ids(model: PreTrainedModel, ids: Tensor, forward_kwargs: dict[str, Any]) -> Tensor:
    """Values of ``token_values``, once the weights are gathered."""
    inner: Any = without_peft(model)
    hidden = inner.base_model(input_ids=ids, **{"use_cache": False, **forward_kwargs}).last_hidden_state
    # In float32 whatever the model computes in: a return is a number that bfloat16 rounds to three digits.
    with torch.autocast(hidden.device.type, enabled=False):
        values = _applied(inner.score, hidden.float())[..., 0]
    # FSDP2 hangs its hook on what leaves here, and warns of views.
    return values.clone()


def _applied(head: Any, hidden: Tensor) -> Tensor:
    """The head's numbers, [B, T, 1], in float32 where its weights were gathered in another precision, too."""
    if isinstance(head, nn.Linear):
        return nn.functional.linear(hidden, head.weight.float())
    return head(hidden.to(head.weight.dtype)).float()  # a layer of peft around it


# A root's weights, which FSDP gathers for the methods that it knows.

_GATHERING = "_gathering_"


def gather_head(model: PreTrainedModel) -> None:
    """Have FSDP gather the root's weights for ``token_logprobs``, or ``token_values``, as it does for ``forward``."""
    function: Callable[..., Any] = of_targets if is_language_model(model) else of_ids
    method = _GATHERING + function.__name__
    object.__setattr__(model, method, types.MethodType(function, model))
    register_fsdp_forward_method(model, method)


def _gathered(model: PreTrainedModel, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(model, *arguments)``, with the root's weights gathered where FSDP holds them."""
    gathering = getattr(model, _GATHERING + function.__name__, None)
    if gathering is None:
        return function(model, *arguments)
    result = gathering(*arguments)
    reshard_without_backward(model)
    return result
