"""The module that policy-gradient algorithms train: an ``rl_fn`` objective over a causal LM."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.data.token_batch import MicroBatch, TokenBatch, restore
from rl_bridge.engines.dispatch import returns
from rl_bridge.functional import from_jax
from rl_bridge.memory.token_budget import within_memory
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.own_loss import TorchLoss, check_loss
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer, following
from rl_bridge.modules.trainable import CausalLMModule, OptimizerConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.heads import token_loss
from rl_bridge.weights.manifest import class_of
from rl_fn import Batch, Objective, Ratio

# Coefficients of an objective's terms as arguments: a controller changes them between steps without a new trace.


def with_coefficients(objective: Objective, coefficients: Mapping[str, Any]) -> Objective:
    """The objective with other coefficients of the terms it has.

    >>> import rl_fn
    >>> with_coefficients(rl_fn.recipes.grpo(), {"kl": 0.5}).kl
    KL(estimator='k3', coef=0.5)
    """
    terms = {name: replace(getattr(objective, name), coef=coef) for name, coef in coefficients.items()}
    return objective.replace(**terms) if terms else objective


def share_of(objective: Objective) -> Callable[..., Any]:
    """``objective.share`` with the coefficients as its last argument."""

    def share(batch: Any, denominator: Any, coefficients: Mapping[str, Any]) -> Any:
        return with_coefficients(objective, coefficients).share(batch, denominator)

    return share


# Losses that are no sum over the parts in which a batch is computed.


def require_micro_batches(objective: Objective) -> None:
    """Refuse an objective whose mean is over what a micro-batch does not hold.

    Raises:
        ValueError: a mean over prompts.
    """
    means = (objective.aggregation, objective.kl_aggregation, objective.entropy_aggregation)
    if any(one is not None and one.mode == "prompt-mean" for one in means):
        raise ValueError(
            f"{objective.name}: a micro-batch holds rows of several prompts, so prompt-mean cannot be trained with"
        )


def require_whole_batch(objective: Objective, parts: int, mesh: Any) -> None:
    """Refuse statistics of the whole batch whose rows are split into ``parts``, over the workers of ``mesh``.

    Raises:
        ValueError: the objective reads such statistics, and each worker has a part of the rows.
    """
    if objective.over_batch and parts > 1:
        raise ValueError(
            f"{objective.name} reads statistics of the whole batch, which is split over {parts} "
            f"workers ({mesh}): train it with replicate=1 and shard=1"
        )


# A policy's loss in the head itself: each logit is computed once in a step, not once forward and once backward.

TOLERANCE = 1e-4


@functools.cache
def require_token_local(objective: Objective) -> None:
    """Refuse a loss in which the term of a token depends on another token: the head sees some tokens at a time.

    Raises:
        ValueError: with the objective's name and what in it may be the reason.
    """
    rng = np.random.default_rng(0)
    fields = {name: jnp.asarray(rng.normal(-1.0, 0.5, (2, 6)), jnp.float32) for name in Batch._fields}
    fields |= {"mask": jnp.ones((2, 6), bool), "segment_ids": None, "correct": jnp.ones((2, 6), bool)}

    def total(leaves: list[Any], cuts: list[dict[str, Any]]) -> Any:
        parts = [{**cut, "logprobs": x, "entropies": e} for cut, (x, e) in zip(cuts, leaves, strict=True)]
        return sum(objective.share(Batch(**part), 12.0)[0] for part in parts)  # pyright: ignore[reportArgumentType]

    def gradient(cuts: list[dict[str, Any]]) -> list[Any]:
        gradients = jax.jit(jax.grad(total))([(cut["logprobs"], cut["entropies"]) for cut in cuts], cuts)
        return [jnp.concatenate([jnp.ravel(part[place]) for part in gradients]) for place in (0, 1)]

    def cut(start: int, stop: int) -> dict[str, Any]:
        return {name: None if x is None else jnp.ravel(x)[start:stop] for name, x in fields.items()}

    whole, apart = gradient([fields]), gradient([cut(0, 5), cut(5, 12)])
    gap = max(float(jnp.abs(a - b).max()) for a, b in zip(whole, apart, strict=True))
    if objective.over_batch or not gap <= TOLERANCE * max(float(jnp.abs(x).max()) for x in whole):
        raise ValueError(
            f"fused_loss takes losses in which no token's term depends on another token; that of {objective.name} does:"
            f" loss={objective.loss}, aggregation={objective.aggregation}, correction={objective.correction}"
        )


def fused_share(
    module: TokenScorer,
    share: Callable[..., Any],
    batch: TokenBatch,
    numbers: Mapping[str, float],
    names: tuple[str, ...],
    entropy: bool,
    *,
    seen: Callable[[torch.Tensor, torch.Tensor, slice], None] | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and metrics of a micro-batch, as ``share`` of its log-probabilities. ``entropy``: it takes a gradient.

    ``seen`` is called with the log-probabilities and entropies of the tokens that the head has at a time.
    """
    module.require_weights()
    if module.arrangements.head != "linear":
        name = class_of(module.model).__name__
        raise ValueError(
            f"fused_loss needs hidden states and a head of one matrix, which {name} lacks: train without fused_loss"
        )
    fields, documents = module.read(batch)
    inputs, targets, counted = fields[:3]
    flat = {name: None if (x := getattr(batch, name)) is None else following(x).flatten(0, 1) for name in names}
    scalars = {name: torch.tensor(float(value), device=inputs.device) for name, value in numbers.items()}
    denominator = scalars.pop("denominator")

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor, _: torch.Tensor, rows: slice) -> tuple[Any, Any]:
        if seen is not None:
            seen(logprobs, entropies, rows)
        of_rows: dict[str, Any] = {name: None if x is None else x[rows] for name, x in flat.items()}
        of_rows |= {"logprobs": logprobs, "entropies": entropies if entropy else entropies.detach()}
        return share(Batch(**of_rows), denominator, scalars)

    options: dict[str, Any] = {"temperature": module.scoring.temperature, "softcap": module.scoring.softcap}
    options |= {"mask": counted, "allowed_tokens": fields[3] if len(fields) > 3 else None}
    with module.autocast(inputs.device):
        if documents is None:
            return token_loss(module.model, inputs, targets, loss, use_cache=False, **options)
        options |= module.packed_kwargs(documents) | {"rows": lambda hidden: documents.put(hidden, inputs.shape)}
        return token_loss(module.model, documents.take(inputs), targets, loss, **options)


# Numbers in a policy's loss of single completions: kept for a reader, without a second forward pass.

COLUMNS = ("logprob", "old_logprob", "ratio", "advantage", "entropy", "rollout_logprob")


class Watch:
    """Keeps the ``COLUMNS`` of watched rows, a number for each of the row's tokens; what is masked is 0 or not read.

    ``ratio`` is exp(logprob − old_logprob): the token's own, of which a loss over sequences makes another.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, list[float]]] = {}

    def see(self, batch: TokenBatch, logprobs: torch.Tensor, entropies: torch.Tensor, marks: torch.Tensor) -> None:
        """Keep the rows whose mark is not −1; ``marks`` is [N] on the host, all others [N, L] of one update."""
        places = (marks >= 0).nonzero()[:, 0]
        if not len(places):
            return
        rows = places.to(batch.tokens.device)
        assert batch.old_logprobs is not None and batch.advantages is not None
        rollout = batch.old_logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        new, old = logprobs.detach()[rows].float(), batch.old_logprobs[rows].float()
        columns = [new, old, (new - old).exp(), batch.advantages[rows], entropies.detach()[rows], rollout[rows]]
        # One transfer for all of them.
        numbers = torch.stack([column.float() for column in columns], 1).cpu()
        lengths = batch.lengths[rows].tolist()
        for mark, values, length in zip(marks[places].tolist(), numbers, lengths, strict=True):
            self._rows[mark] = dict(zip(COLUMNS, values[:, :length].tolist(), strict=True))

    def take(self) -> dict[int, dict[str, list[float]]]:
        """The rows kept since the last call."""
        rows, self._rows = self._rows, {}
        return rows


class Seen:
    """Log-probabilities and entropies of a loss inside the head, which has some tokens at a time."""

    def __init__(self, batch: TokenBatch) -> None:
        self._shape = batch.tokens.shape
        count = self._shape[0] * max(1, self._shape[1] - 1)
        self._columns = torch.zeros(2, count, device=batch.tokens.device)

    def __call__(self, logprobs: torch.Tensor, entropies: torch.Tensor, rows: slice) -> None:
        """Take those of the tokens ``rows`` of all rows that lie one behind another, the first column left out."""
        self._columns[0, rows], self._columns[1, rows] = logprobs.detach(), entropies.detach()

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as [N, L]."""
        whole = torch.zeros(2, *self._shape, device=self._columns.device)
        whole[:, :, 1:] = self._columns.view(2, self._shape[0], -1)[:, :, : self._shape[1] - 1]
        return whole[0], whole[1]


# The module.

SHARED = tuple(name for name in Batch._fields if name in TokenBatch._fields)
"""Fields that an objective reads and a batch brings along."""


class PolicyModule(CausalLMModule):
    """``train_step`` accumulates the gradient of the objective over micro-batches; ``optimizer_step`` applies it."""

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        objective: Objective,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        fused_loss: bool = False,
    ) -> None:
        """With ``fused_loss`` the head computes each logit once, not twice: for losses that are a sum over tokens.

        Raises:
            ValueError: ``fused_loss`` with a loss in which the term of a token depends on another token, a mean over
                prompts, or a loss of the user's own that is wrong on a small batch.
        """
        require_micro_batches(objective)
        check_loss(objective.loss)
        if fused_loss and isinstance(objective.loss, TorchLoss):
            raise ValueError(f"fused_loss takes losses in JAX, {objective.loss.name} is in PyTorch: train without")
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        self.objective, self.fused_loss = objective, fused_loss
        self._learns_entropy = objective.entropy is not None or "entropies" in objective.loss.required_fields
        if fused_loss:
            require_token_local(objective)
        self._share = from_jax(share_of(objective))
        self._watch = Watch()

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the model over the mesh.

        Raises:
            ValueError: the objective reads statistics of the whole batch, whose rows the mesh splits.
        """
        self._mesh = mesh
        require_whole_batch(self.objective, self._ranks("replicate") * self._ranks("shard"), mesh)
        super().parallelize(mesh)

    @returns("sum")
    @within_memory
    def train_step(
        self,
        batch: TokenBatch,
        denominator: float,
        coefficients: Mapping[str, float] | None = None,
        watched: torch.Tensor | None = None,
    ) -> dict[str, Ratio]:
        """Add the gradient of Σ per-token losses / ``denominator`` to the parameters' gradients.

        ``denominator`` is ``objective.denominator`` of the whole batch, over all micro-batches and workers: the
        gradient then does not depend on how the batch was cut. A denominator of 0 (a sum) means 1. Returns undivided
        metrics, which add up likewise. ``coefficients`` are of terms in place of the objective's own: they may change
        from step to step without a new trace. ``watched`` [N] int64: a number for each row that ``take_watched`` is to
        tell of, −1 for others.
        """
        if batch.old_logprobs is None or batch.advantages is None:
            raise ValueError("train_step needs batch.old_logprobs and batch.advantages")
        parts, numbers = self.micro_batches(batch), {"denominator": denominator, **(coefficients or {})}
        if self.objective.over_batch and len(parts) > 1:
            return self._step_over_batch(batch.to(self.compute_device()), parts, numbers, watched)
        metrics: dict[str, Any] = {}
        for part in self.balanced_parts(parts):
            marks = None if watched is None else watched[part.places.cpu()]
            step = self._fused if self.fused_loss else self._apart
            results = step(part.batch, numbers, marks)
            for name, value in results.items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics | self.balance_metrics()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what ``train_step`` left for ``optimizer_step`` and for ``take_watched``."""
        super().zero_grad(set_to_none)
        self._watch.take()

    @returns("local")
    def take_watched(self) -> dict[int, dict[str, list[float]]]:
        """Values in the loss of each watched row since the last call, by the row's number; see ``Watch``."""
        return self._watch.take()

    def _apart(self, batch: TokenBatch, numbers: Mapping[str, float], marks: torch.Tensor | None) -> dict[str, Any]:
        logprobs, entropies = self(batch)
        return self._backward(batch, logprobs, entropies, numbers, marks)

    def _fused(self, batch: TokenBatch, numbers: Mapping[str, float], marks: torch.Tensor | None) -> dict[str, Any]:
        if self._ranks("tensor") > 1 or self._ranks("sequence") > 1:
            raise ValueError(f"fused_loss needs the whole vocabulary and whole rows on each worker, got {self._mesh}")
        observer = None if marks is None else Seen(batch)
        loss, metrics = fused_share(self, self._share, batch, numbers, SHARED, self._learns_entropy, seen=observer)
        if observer is not None and marks is not None:
            self._watch.see(batch, *observer.columns(), marks)
        self.backward(loss)
        return {name: detached(part) for name, part in metrics.items()}

    def _backward(
        self,
        batch: TokenBatch,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        numbers: Mapping[str, float],
        marks: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Send the loss of these log-probabilities back through them; returns the metrics."""
        if marks is not None:
            self._watch.see(batch, logprobs, entropies, marks)
        fields: dict[str, Any] = {name: getattr(batch, name) for name in SHARED}
        fields["logprobs"] = logprobs
        # Shown as a metric always; differentiated only where something in the objective may have a gradient there.
        fields["entropies"] = entropies if self._learns_entropy else entropies.detach()
        scalars = {name: torch.tensor(float(value), device=logprobs.device) for name, value in numbers.items()}
        loss, metrics = self._share(Batch(**fields), scalars.pop("denominator"), scalars)
        self.backward(loss)
        return {name: detached(part) for name, part in metrics.items()}

    def _step_over_batch(
        self, batch: TokenBatch, parts: list[MicroBatch], numbers: Mapping[str, float], marks: torch.Tensor | None
    ) -> dict:
        """``train_step`` of a loss that reads statistics of the whole batch: two forward passes, the same memory.

        The first pass, without a graph, gives the loss every log-probability at once, and the loss gives each of them
        its gradient. The second pass carries these gradients to the parameters, one micro-batch at a time.
        """
        with torch.no_grad():
            outputs = [self(part.batch) for part in parts]
        logprobs, entropies = (
            restore([(part.places, x) for part, x in zip(parts, column, strict=True)], batch.tokens).requires_grad_()
            for column in zip(*outputs, strict=True)
        )
        metrics = self._backward(batch, logprobs, entropies, numbers, marks)
        for part in self.balanced_parts(parts):
            pairs = [
                (x, part.of(w.grad))
                for x, w in zip(self(part.batch), (logprobs, entropies), strict=True)
                if w.grad is not None
            ]
            self.backward_through_values(pairs)
        return metrics | self.balance_metrics()


def detached(part: Any) -> Any:
    """A ``Ratio`` of torch scalars without its graph, in float64 for the sum over many parts."""
    return Ratio(*(value.detach().double() for value in part))


def mean(metric: Any) -> float:
    """The value of a ``Ratio`` of torch scalars as a Python number, once all of its parts are in."""
    total, denominator = float(metric.total), float(metric.denominator)
    return total / denominator if denominator else total


def means(metrics: Mapping[str, Any], *, sums: tuple[str, ...] = ()) -> dict[str, float]:
    """The values of these ``Ratio``. What is of nothing in this batch has no mean, and is left out.

    ``sums``: names of those for which a denominator of 0 stands for a plain sum, as an aggregation "token-sum" has it.

    >>> from rl_fn import Ratio
    >>> metrics = {"loss": Ratio(3.0, 0.0), "chosen_reward": Ratio(6.0, 2.0), "rejected_reward": Ratio(0.0, 0.0)}
    >>> means(metrics, sums=("loss",))
    {'loss': 3.0, 'chosen_reward': 3.0}
    """
    return {name: mean(value) for name, value in metrics.items() if name in sums or float(value.denominator)}
