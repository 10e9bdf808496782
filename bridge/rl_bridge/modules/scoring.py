"""Log-probabilities of tokens: how they are scored, and a frozen model that scores them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.data.token_batch import MicroBatch, TokenBatch, micro_batches, restore, stand_in
from rl_bridge.engines.dispatch import returns
from rl_bridge.engines.module import ParallelModule
from rl_bridge.memory.token_budget import TokenBudget, scores_within_memory
from rl_bridge.models.exported_files import ExportTypes
from rl_bridge.models.model_source import ModelSource, device_of
from rl_bridge.models.pretrained import save_sharded_model
from rl_bridge.models.row_checks import positions_of, rotary_bound
from rl_bridge.modules.cpu_layers import use_cpu_layers
from rl_bridge.parallel.adapter_effects import require_effect
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.documents import Documents
from rl_bridge.parallel.heads import token_logprobs
from rl_bridge.parallel.mesh import AXES, agree_max_over
from rl_bridge.parallel.parallelize import parallelize
from rl_bridge.parallel.probe import Arrangements, forward_kwargs, probe
from rl_bridge.weights.manifest import class_of, without_peft

_ARRANGEMENT = ("micro_batch_tokens", "share_prefixes", "packing")
"""Options of ``ScoringConfig`` that say where rows lie, with the same results."""


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How the probability of a token is computed. Policy, old policy and reference of a run share one.

    Two models with the same weights then have the same log-probabilities: their KL is 0 and their ratio 1.
    """

    temperature: float = 1.0
    """Divides the logits. It is the temperature that the completions were sampled at."""
    micro_batch_tokens: int | Literal["auto"] = 16384
    """Tokens of one forward pass, with the padding there is. More cost memory, and fewer cost time. "auto": as many as
    the device has room for."""
    share_prefixes: bool = True
    """The rows of a group have their common first tokens computed once, where these are at least an eighth of the
    group's longest row. Such rows are packed. The results are the same."""
    packing: bool = False
    """Rows lie one behind another instead of each padded to the longest beside it. The results are the same."""
    softcap: float | None = None
    """softcap · tanh(logits / softcap), for a model that does not cap its logits itself."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the model's matrix products. Weights and log-probabilities stay in float32."""

    def __post_init__(self) -> None:
        """Refuse what no distribution has."""
        check_options(self)
        if not (
            0 < self.temperature < float("inf")
            and (self.micro_batch_tokens == "auto" or self.micro_batch_tokens > 0)
            and (self.softcap is None or self.softcap > 0)
        ):
            raise ValueError(
                "need temperature > 0, micro_batch_tokens > 0 and softcap > 0 or None, got "
                f"{given(self, 'temperature', 'micro_batch_tokens', 'softcap')}"
            )

    def is_same_distribution(self, other: "ScoringConfig") -> bool:
        """Whether both give each token the same probability, however their rows lie in micro-batches.

        >>> ScoringConfig(packing=True).is_same_distribution(ScoringConfig())
        True
        >>> ScoringConfig(softcap=30.0).is_same_distribution(ScoringConfig())
        False
        """
        return self == replace(other, **{name: getattr(self, name) for name in _ARRANGEMENT})

    @property
    def exact(self) -> bool:
        """Whether tokens have the probabilities that a rollout in float32 drew them with, to rounding."""
        return self.softcap is None and self.dtype == "float32"


@dataclass(frozen=True, kw_only=True)
class RoundedScoring(ScoringConfig):
    """How a model scores whose ``ParallelConfig`` rounds its weights: otherwise than one with whole weights."""

    param_dtype: str

    @property
    def exact(self) -> bool:
        """Never."""
        return False


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


class Scorer(ParallelModule):
    """A transformer over batches of tokens, in micro-batches, over a mesh. What it makes of a token a subclass says.

    On its own it has no optimiser: its weights are frozen.
    """

    cuts_sequences: ClassVar[bool] = True
    takes_empty_shares: ClassVar[bool] = True
    trainable: ClassVar[bool] = False

    def __init__(
        self, source: ModelSource, scoring: ScoringConfig | None = None, *, parallel: ParallelConfig | None = None
    ) -> None:
        """The model is in evaluation mode: with dropout, no model would agree with its own copy.

        Made by an engine's factory, on the meta device; its weights come with ``load_weights``.
        """
        super().__init__()
        self.model = source.empty().eval()
        if not self.trainable:
            self.model.requires_grad_(False)  # else the source says what is trained: with LoRA the adapters alone
        use_rl_fn_attention(self.model)
        use_cpu_layers(self.model)
        self.scoring = ScoringConfig() if scoring is None else scoring
        self._source, self._parallel = source, ParallelConfig() if parallel is None else parallel
        self._mesh: DeviceMesh | None = None
        self.budget = TokenBudget() if self.scoring.micro_batch_tokens == "auto" else None
        self.largest_micro_batch = 0
        self.arrangements = Arrangements()
        self._copy: list[torch.Tensor] = []
        self._positions, self._longest = positions_of(self.model), rotary_bound(self.model)

    def exported(self) -> torch.nn.Module:
        """The Hugging Face model: its weights travel under its own names."""
        return self.model

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the model over the mesh."""
        self._mesh = mesh
        parallelize(self.model, mesh, self._parallel)

    def load_weights(self) -> None:
        """Read from the source what this worker holds, and see which arrangements of rows are right for the model."""
        if self._mesh is None:
            parallelize(self.model, None, self._parallel, device_type=self.device.type)
        self._source.load(self.model, self.device)
        exact = _is_exact(self._parallel.param_dtype)
        self.arrangements = probe(self.model, self._mesh, exact=exact)
        require_effect(self.model, self._mesh, exact=exact)

    def micro_batches(self, batch: TokenBatch) -> list[MicroBatch]:
        """The batch in parts that one forward pass takes, where the model computes; as many on all workers.

        Workers that have fewer, or no rows at all, get stand-ins, so that the models' collectives match.
        """
        parts = micro_batches(batch, self.micro_batch_tokens(), **self.arranged())
        self.largest_micro_batch = max((part.batch.tokens.numel() for part in parts), default=0)
        parts += [stand_in(batch)] * (self.agreed_count(len(parts)) - len(parts))
        return [part.to(self.compute_device()) for part in parts]

    def arranged(self) -> dict[str, bool]:
        """How rows lie in micro-batches: as asked for, where that is right for the model."""
        scoring, right = self.scoring, self.arrangements
        return {"packing": scoring.packing and right.packed, "share_prefixes": scoring.share_prefixes and right.shared}

    @returns("same")
    def notes(self) -> list[str]:
        """Why rows lie otherwise than asked for; empty where they do not."""
        requested = {"padded": True, "packed": self.scoring.packing, "shared": self.scoring.share_prefixes}
        return [note for arranged, note in self.arrangements.notes.items() if requested[arranged]]

    def micro_batch_tokens(self) -> int:
        """Tokens of the next micro-batches: the configured number, or the smallest budget of all workers."""
        if self.budget is None:
            assert self.scoring.micro_batch_tokens != "auto"
            return self.scoring.micro_batch_tokens
        self.budget.tokens = -int(agree_max_over(AXES, -self.budget.tokens, self._mesh))
        return self.budget.tokens

    def agreed_count(self, parts: int) -> int:
        """Forward passes that each worker makes, where this one has ``parts``: the most of all, and at least one."""
        return int(agree_max_over(("shard", "replicate"), max(1, parts), self._mesh))

    def documents(self, batch: TokenBatch, lengths: torch.Tensor) -> Documents | None:
        """The first ``lengths`` tokens of each row, [N], as one packed row; None where rows lie padded side by side.

        Rows of a micro-batch that share a prefix are packed, with the prefix once.

        Raises:
            ValueError: a row beyond the model's positions, or one for which the model would turn the rows beside it
                otherwise.
        """
        longest = max(batch.lengths.tolist(), default=0)
        if self._positions is not None and longest > self._positions:
            raise ValueError(
                f"a row has {longest} tokens, and {class_of(without_peft(self.model)).__name__} has {self._positions} "
                "positions: leave out longer rows (max_tokens of conversations)"
            )
        if self._longest is not None and longest > self._longest:
            raise ValueError(
                f"a row has {longest} tokens: {class_of(without_peft(self.model)).__name__} chooses its rotary "
                f"frequencies by the longest row of a call beyond {self._longest} tokens, and every row beside it "
                "would change; leave out longer rows"
            )
        shared = None
        arranged = self.arranged()
        if arranged["share_prefixes"]:
            shared = torch.minimum(batch.prefixes_worth_sharing(), lengths)
        if shared is not None and bool(shared.any()):
            return Documents(lengths, self._mesh, groups=batch.groups, shared=shared)
        return Documents(lengths, self._mesh) if arranged["packing"] or self._ranks("sequence") > 1 else None

    def packed_kwargs(self, documents: Documents) -> dict[str, Any]:
        """Arguments of the model's call with packed documents, beside the tokens."""
        return forward_kwargs(self.model, documents)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The arithmetic of the model. Off as well as on: a caller's own would score a model otherwise than others."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.scoring.dtype == "bfloat16")

    def compute_device(self) -> torch.device:
        """Where the model computes: not where its weights lie if these are offloaded."""
        return self.weights_device() if self._mesh is None else device_of(self.model)

    @returns("same")
    def scoring_config(self) -> ScoringConfig:
        """How this module scores."""
        dtype = self._parallel.param_dtype
        return self.scoring if _is_exact(dtype) else RoundedScoring(**vars(self.scoring), param_dtype=str(dtype))

    @returns("same")
    def weights_version(self) -> int:
        """The version that the weights came with."""
        return self.weight_receiver().usable_version()

    @returns("same")
    def copy_weights(self) -> None:
        """Keep a copy of the weights, for ``average_weights``."""
        self._copy = [parameter.detach().clone() for parameter in self.model.parameters()]

    @returns("same")
    def average_weights(self, share: float) -> None:
        """θ ← share · θ + (1 − share) · θ_copy. The copy is gone then.

        Raises:
            RuntimeError: there is no copy.
        """
        copied, self._copy = self._copy, []
        if not copied:
            raise RuntimeError("copy_weights comes before average_weights")
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), copied, strict=True):
                parameter.mul_(share).add_(before, alpha=1.0 - share)

    @returns("same")
    def save_pretrained(self, folder: str, types: ExportTypes | None = None) -> None:
        """Write the model in Hugging Face format, whole; the engine's first worker does.

        Without ``types`` the weights have the dtype that they are trained in.
        """
        self.require_weights()
        save_sharded_model(self.model, folder, types)

    def checkpoint_state(self) -> dict[str, Any]:
        """The weights and their version, the optimiser of a module that has one, and what a token budget has learnt.

        With LoRA the frozen base belongs to the weights.
        """
        state = {"model": self.model.state_dict(), "version": self.weights_version(), **self.optimizer_states()}
        return state if self.budget is None else state | {"budget": self.budget.learnt()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave.

        Weights of an earlier version than there was here are a new one: who has the later ones takes them, and no two
        weights have one version.
        """
        self.make_room()
        self.model.load_state_dict(state["model"])
        self.load_optimizer_states(state)
        if self.budget is not None and "budget" in state:
            self.budget.go_on(state["budget"])
        receiver, version = self.weight_receiver(), state["version"]
        receiver.version = version if version >= receiver.latest else receiver.latest + 1

    def _ranks(self, axis: str) -> int:
        return 1 if self._mesh is None else self._mesh.get_group(axis).size()


class TokenScorer(Scorer):
    """A causal LM that scores tokens. A frozen reference is one."""

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the tokens that count, [N, L] each, zero where masked."""
        self.require_weights()
        fields, documents = self.read(batch)
        rows, columns = batch.tokens.shape
        if documents is None:
            # Padding is on the right, where attention is causal and needs no mask.
            scores = self._scores(*fields, use_cache=False)
        else:
            packed = [documents.take(x) for x in fields]
            scores = documents.put(self._scores(*packed, **self.packed_kwargs(documents)), (rows, max(1, columns - 1)))
        scores = torch.nn.functional.pad(scores, (0, 0, 1, 0))[:, :columns].masked_fill(~batch.mask[..., None], 0.0)
        logprobs, entropies = scores.unbind(-1)
        return logprobs, entropies

    def read(self, batch: TokenBatch) -> tuple[list[torch.Tensor], Documents | None]:
        """Tokens that the model reads, [N, L − 1], what each predicts, whether that counts, and the allowed tokens.

        Position t predicts token t + 1: shifted before rows are packed, so that no document predicts the next one's. A
        row's last token predicts nothing, and the model does not read it.
        """
        fields = [batch.tokens[:, : max(1, batch.tokens.shape[1] - 1)], following(batch.tokens), following(batch.mask)]
        if batch.allowed_tokens is not None:
            fields.append(following(batch.allowed_tokens))
        return fields, self.documents(batch, (batch.lengths - 1).clamp(min=0))

    def _scores(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        allowed: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Log-probabilities and entropies [N, T, 2] of ``targets``; only those that count reach the vocabulary."""
        with self.autocast(tokens.device):
            logprobs, entropies = token_logprobs(
                self.model,
                tokens,
                targets,
                temperature=self.scoring.temperature,
                softcap=self.scoring.softcap,
                mask=counted,
                allowed_tokens=allowed,
                head=self.arrangements.head,
                **options,
            )
        assert entropies is not None
        return torch.stack([logprobs, entropies], -1)

    @returns("rows")
    @scores_within_memory
    @torch.no_grad()
    def token_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probabilities of the tokens that count under the present weights, [N, L], zero where masked."""
        parts = self.micro_batches(batch)
        return restore([(part.places, self(part.batch)[0]) for part in parts], batch.tokens)


def following(values: torch.Tensor) -> torch.Tensor:
    """Values of the token after each but the last, [N, L, …] → [N, L − 1, …]; zeros [N, 1, …] for one column."""
    return values[:, 1:] if values.shape[1] > 1 else torch.zeros_like(values)
