"""A mixture's load-balancing loss, where the model's configuration asks for it: the same for any cut of the batch.

Of the tokens that all layers see, N, f_e is the fraction that chose expert e, and P_e the mean probability of e. The
loss is experts · Σ_e f_e · P_e, which is no sum over tokens. But f has no gradient: a first pass counts f over all
micro-batches and workers, and each micro-batch then adds its own part of experts · Σ_e f_e · ΣP_e / N.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.weights.manifest import without_peft
from rl_fn import Ratio

METRIC = "router_balance"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_DATA = ("shard", "replicate")
Part = TypeVar("Part", bound=Any)


class RouterBalance:
    """The loss of one model. ``parts`` goes round the forward and backward passes of a step, ``term`` is the loss."""

    def __init__(self, model: Any) -> None:
        """``model``: a causal language model or peft's around one, whose configuration asks for the loss.

        Raises:
            NotImplementedError: transformers' own loss of this family is another one, or there is none.
        """
        inner: Any = without_peft(model)
        self._name = type(inner).__name__
        self.coefficient = _coefficient(inner)
        self._experts = int(getattr(inner, "num_experts", None) or 0)
        self._experts_a_token = int(getattr(inner, "num_experts_per_tok", None) or 0)
        function = getattr(sys.modules[type(inner).__module__], "load_balancing_loss_func", None)
        with torch.device("cpu"):
            is_known = function is not None and self._experts and self._experts_a_token and self._is(function)
        if not is_known:
            raise NotImplementedError(
                f"the configuration of {self._name} has output_router_logits=True, and a load-balancing loss that is "
                "not here: set output_router_logits=False, or its coefficient to 0"
            )
        self._logits: tuple[Tensor, ...] | None = None
        self._current: tuple[Any, Tensor] | None = None
        self._frequencies: Tensor | None = None
        self._counted = torch.zeros(0)
        self._total: Any = 0
        inner.base_model.register_forward_hook(self._record)

    def parts(
        self, module: Any, parts: Iterable[Part], forward: Callable[[Part], Any], batch_of: Callable[[Part], TokenBatch]
    ) -> Iterator[Part]:
        """The micro-batches, each while it is the one that ``term`` is for. Several are counted first.

        Args:
            module: the scorer, whose workers all take part.
            parts: at least one, and as many on all workers; one without places is a stand-in.
            forward: of the model, on a micro-batch.
            batch_of: a micro-batch's tokens.
        """
        parts = list(parts)
        weights = [_weights(module, part, batch_of(part)) for part in parts]
        self._total, self._frequencies = 0, None
        self._counted = torch.zeros(self._experts + 1, dtype=torch.float64, device=weights[0].device)
        if len(parts) > 1:
            with torch.no_grad():
                for part, weight in zip(parts, weights, strict=True):
                    forward(part)
                    self._count(weight)
            self._agree(module)
        for part, weight in zip(parts, weights, strict=True):
            self._current = (module, weight)
            yield part
            self._current = None

    def term(self) -> Tensor | None:
        """The term that the last forward pass adds to the loss, with its graph; None outside of ``parts``."""
        if self._current is None:
            return None
        module, weight = self._current
        if self._frequencies is None:
            self._count(weight, keep=True)
            self._agree(module)
        assert self._frequencies is not None
        logits, self._logits = self._recorded(), None
        probabilities = sum((_probabilities(layer, weight) for layer in logits), torch.zeros_like(self._frequencies))
        total = self._experts * (self._frequencies * probabilities).sum()
        tokens = float(self._counted[-1])
        ratio: Any = (total.detach().double(), (weight.sum() * len(logits)).double())
        self._total = self._total + Ratio(*ratio)
        return self.coefficient * total / max(1.0, tokens)

    def forget(self) -> None:
        """Begin anew after a pass that ended in its middle: no later loss gets the term of its micro-batch."""
        self._current, self._logits = None, None

    def metrics(self) -> dict[str, Any]:
        """The loss of the last step without its coefficient, undivided."""
        return {METRIC: self._total}

    def _record(self, trunk: Any, inputs: Any, output: Any) -> None:
        self._logits = getattr(output, "router_logits", None)

    def _recorded(self) -> tuple[Tensor, ...]:
        if not self._logits:
            raise NotImplementedError(f"{self._name} gives no router_logits: set output_router_logits=False")
        return tuple(layer.reshape(-1, layer.shape[-1]) for layer in self._logits)

    def _count(self, weight: Tensor, *, keep: bool = False) -> None:
        logits = self._recorded()
        if not keep:
            self._logits = None
        for layer in logits:
            self._counted[:-1] += _tokens_of_experts(layer.detach(), self._experts_a_token, weight)
        self._counted[-1] += weight.sum() * len(logits)

    def _agree(self, module: Any) -> None:
        """Counts of all workers that have rows of their own."""
        for axis in _DATA:
            if module._ranks(axis) > 1:
                dist.all_reduce(self._counted, group=module._mesh.get_group(axis))
        self._frequencies = (self._counted[:-1] / self._counted[-1].clamp(min=1)).float()

    def _is(self, function: Callable[..., Any]) -> bool:
        """Whether the family's own function gives what is computed here, for two layers of random routers."""
        generator = torch.Generator().manual_seed(0)
        logits = [torch.randn(6, self._experts, generator=generator) for _ in range(2)]
        weight = torch.tensor([1.0, 1, 1, 0, 1, 0])
        try:
            value = function(tuple(logits), self._experts, self._experts_a_token, weight.reshape(2, 3))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # other arguments, such as Doge's
        tokens = 2 * weight.sum()
        counts = sum(
            (_tokens_of_experts(layer, self._experts_a_token, weight) for layer in logits), torch.zeros(self._experts)
        )
        sums = sum((_probabilities(layer, weight) for layer in logits), torch.zeros(self._experts))
        return bool(torch.isclose(value, self._experts * (counts / tokens * sums / tokens).sum(), rtol=1e-5))


def router_balance(model: Any) -> RouterBalance | None:
    """The loss that the configuration of ``model`` asks for: output_router_logits, and a coefficient that is not 0."""
    inner: Any = without_peft(model)
    config = inner.config.get_text_config()
    if not getattr(config, "output_router_logits", False) or inner.get_output_embeddings() is None:
        return None
    return RouterBalance(model) if _coefficient(inner) else None


def require_whole_rows(module: Any) -> None:
    """Refuse workers that hold a part of a row, or of a router.

    Raises:
        NotImplementedError: tensor or sequence parallelism.
    """
    for axis in ("tensor", "sequence"):
        if module._ranks(axis) > 1:
            raise NotImplementedError(
                f"a load-balancing loss needs {axis}=1, not {module._ranks(axis)}: set output_router_logits=False in "
                "the model's configuration, or train with shard and replicate"
            )


def _coefficient(inner: Any) -> float:
    owners = (inner, inner.config.get_text_config())
    values = (getattr(owner, name, None) for owner in owners for name in _COEFFICIENTS)
    return float(next((x for x in values if x is not None), 0.0))


def _tokens_of_experts(logits: Tensor, count: int, weight: Tensor) -> Tensor:
    """How many tokens each expert is chosen for, as transformers counts: the largest probabilities, [experts]."""
    experts = torch.topk(logits.softmax(-1), count, dim=-1).indices.reshape(-1)
    counts = torch.zeros(logits.shape[-1], dtype=weight.dtype, device=weight.device)
    return counts.scatter_add_(0, experts.to(weight.device), weight.repeat_interleave(count))


def _probabilities(logits: Tensor, weight: Tensor) -> Tensor:
    return (logits.softmax(-1).float() * weight[:, None]).sum(0)


def _weights(module: Any, part: Any, batch: TokenBatch) -> Tensor:
    """How many of the batch's tokens each token of the forward pass stands for, [tokens] float32.

    Padding and stand-ins are none, and a shared prefix is that of all of its rows. A row's last token is not read.
    """
    lengths = (batch.lengths - 1).clamp(min=0)
    columns = max(1, batch.tokens.shape[1] - 1)
    inside = (torch.arange(columns, device=lengths.device) < lengths[:, None]).float()
    if not len(part.places):
        inside = torch.zeros_like(inside)
    documents = module.documents(batch, lengths)
    if documents is None:
        return inside.flatten()
    with torch.enable_grad():
        packed = torch.ones(1, documents.tokens, device=inside.device, requires_grad=True)
        [weights] = torch.autograd.grad((documents.put(packed, inside.shape) * inside).sum(), packed)
    return weights[0]
