"""The columns of the table that one process computes."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.data.trajectory import SamplingParams, requests_of
from rl_bridge.engines.worker import torch_worker
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import ModelSource, PretrainedSource, StateSource, ValueSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.modules.trainable import CausalLMModule, OptimizerConfig
from rl_bridge.modules.value import ValueScorer
from rl_bridge.rollout import InProcessRollout
from tests.bridge.families import reference, zoo
from tests.bridge.families.cells import NONE, PADDED, RIGHT, Cell, building, cell, judged
from tests.bridge.families.reference import TOLERANCE, Numbers
from tests.support.one_process import put, sync

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
ARRANGEMENTS = {
    "padded": ScoringConfig(packing=False, share_prefixes=False),
    "packed": ScoringConfig(packing=True, share_prefixes=False),
    "shared": ScoringConfig(packing=False, share_prefixes=True),
}
COLUMNS = ("load", *ARRANGEMENTS, "decoder", "lora", "export", "classifier")
TEMPERATURE = 4.0
TOKENIZER = character_tokenizer("0123456789")


def built(kind: Any, *args: Any, **options: Any) -> Any:
    """A module of the class ``kind`` as an engine makes it on one worker; a refusal there is by name or wrong."""
    state = generators()
    return building(lambda: torch_worker(lambda: kind(*args, **options), None, torch.device("cpu"), state))


def trained(module: CausalLMModule, rows: TokenBatch) -> Numbers:
    """Log-probabilities as ``token_logprobs`` has them, and gradients by micro-batch, as ``train_step`` adds them."""
    values, weights = module.token_logprobs(rows), reference.weights(rows.mask)
    module.model.zero_grad()
    for part in module.micro_batches(rows):
        logprobs, _ = module(part.batch)
        (logprobs * part.of(weights)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None}
    module.model.zero_grad()
    return Numbers(values, gradients)


class Family:
    """A tiny model, its batch, and what the plain model says of it."""

    def __init__(self, model_type: str) -> None:
        self.model_type, self.rows = model_type, reference.batch()
        self.model = zoo.tiny(model_type)
        self.source = StateSource(self.model)

    @functools.cached_property
    def wanted(self) -> Numbers:
        """What the plain model says; of some families it says nothing, and then they are refused before."""
        return reference.numbers(self.model, self.rows)

    def cells(self, columns: tuple[str, ...] = COLUMNS) -> dict[str, Cell]:
        """The family's row of the table."""
        found: dict[str, Cell] = {}
        ways: dict[str, Callable[[], Mapping[str, float] | Cell]] = {
            "load": self.load,
            "decoder": self.decoder,
            "lora": self.lora,
            "export": self.export,
            "classifier": self.classifier,
        }
        if arranged := [name for name in columns if name in ARRANGEMENTS]:
            found |= self.arranged(arranged)
        return {name: found[name] if name in found else cell(self.model, ways[name]) for name in columns}

    def load(self) -> dict[str, float]:
        """From a folder that transformers wrote: the logits of plain ``from_pretrained``."""
        with tempfile.TemporaryDirectory() as folder:
            zoo.folder(self.model_type, folder)
            options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
            plain = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
            loaded = building(lambda: _loaded(PretrainedSource(folder)))
        loaded.set_attn_implementation("eager")
        return {"logits": reference.error(_logits(loaded, self.rows), _logits(plain, self.rows)) / TOLERANCE}

    def arranged(self, names: list[str]) -> dict[str, Cell]:
        """Padded, packed and shared rows of one module: values and gradients."""
        modules: list[CausalLMModule] = []

        def made() -> CausalLMModule:
            if not modules:
                modules.append(built(CausalLMModule, self.source, OPTIMIZER, updates=1))
            return modules[0]

        def one(name: str) -> Cell:
            module = made()
            module.scoring = ARRANGEMENTS[name]
            found = reference.errors(trained(module, self.rows), self.wanted)
            found = reference.within_rounding(found, self.model, self.rows)
            note = module.arrangements.notes.get(name, "")
            return judged(found, PADDED if note and name != "padded" else RIGHT, note)

        return {name: cell(self.model, lambda name=name: one(name)) for name in names}

    def decoder(self) -> dict[str, float]:
        """Draws of prompts of unlike lengths: their log-probabilities under the plain model."""
        prompts = [self.rows.tokens[row, :length].tolist() for row, length in ((0, 3), (1, 13), (2, 5), (4, 9))]
        # At a high temperature no draw is certain: tied embeddings repeat their last token.
        sampling = SamplingParams(max_new_tokens=10, n=3, seed=3, temperature=TEMPERATURE)
        rollout = building(lambda: InProcessRollout(self.source, TOKENIZER))
        building(lambda: rollout.decoder(sampling))
        drawn = [t for group in rollout.generate(requests_of(prompts, 3), sampling) for t in group]
        assert sum(len(t.sampled_tokens) for t in drawn) > 20
        found, wanted = [], []
        for trajectory in drawn:
            tokens, start = torch.tensor([trajectory.tokens]), len(trajectory.prompt_tokens)
            with torch.no_grad():
                logits = self.model(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1].float()
            wanted.append(torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, tokens[0, start:, None])[:, 0])
            found.append(torch.tensor(trajectory.sampled_logprobs))
        values = {"values": reference.error(torch.cat(found), torch.cat(wanted)) / TOLERANCE}
        return reference.within_rounding(values, self.model, self.rows)

    def lora(self) -> Cell:
        """A random adapter: scores and gradients of peft's model, and of the plain model that it is synced to."""
        source = LoRASource(self.source, rank=2, alpha=4)
        module = built(CausalLMModule, source, OPTIMIZER, updates=1, scoring=ARRANGEMENTS["padded"])
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in module.model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        with _eager(module.model):
            wanted = reference.numbers(module.model, self.rows)
        if float((wanted.values - self.wanted.values).abs().max()) < 1e-2:
            raise AssertionError("the adapter changes nothing")
        found = reference.errors(trained(module, self.rows), wanted)
        target = built(TokenScorer, StateSource(zoo.tiny(self.model_type, seed=1)), ARRANGEMENTS["padded"])
        executor = LocalExecutor("cpu")
        put(executor, "policy", module)
        put(executor, "rollout", target)
        sync(executor, None)
        merged = reference.error(target.token_logprobs(self.rows), wanted.values) / TOLERANCE
        found = reference.within_rounding(found, self.model, self.rows)
        return judged(found | {"merged and synced": merged})

    def export(self) -> dict[str, float]:
        """Trained weights, written: read by plain transformers they are the trainer's."""
        module = built(CausalLMModule, self.source, OPTIMIZER, updates=1)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in module.model.parameters():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
            plain = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        with _eager(module.model):
            wanted = _logits(module.model, self.rows)
        if float((wanted - _logits(self.model, self.rows)).abs().max()) < 1e-2:
            raise AssertionError("the weights did not change")
        return {"logits": reference.error(_logits(plain, self.rows), wanted) / TOLERANCE}

    def classifier(self) -> Mapping[str, float] | Cell:
        """A reward model: scores are those of ``AutoModelForSequenceClassification`` on the exported folder."""
        if self.model.config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            return Cell(NONE, "transformers has no classifier of the family")
        source = ValueSource(self.source, seed=1, pad_token=zoo.PAD)
        scorer = built(ValueScorer, source, ScoringConfig())
        scores = scorer.scores(self.rows)
        with tempfile.TemporaryDirectory() as folder:
            scorer.save_pretrained(folder)
            options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
            plain = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
        with torch.no_grad():
            rows = zip(self.rows.tokens, self.rows.lengths.tolist(), strict=True)
            wanted = torch.stack([plain(input_ids=row[None, :n], use_cache=False).logits[0, 0] for row, n in rows])
        if float(wanted.std()) < 1e-2:
            raise AssertionError("all scores are alike")
        return {"scores": reference.error(scores, wanted) / TOLERANCE}


def _loaded(source: ModelSource) -> PreTrainedModel:
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model


@torch.no_grad()
def _logits(model: PreTrainedModel, rows: TokenBatch) -> torch.Tensor:
    """Logits [tokens, V] of each row alone."""
    each = zip(rows.tokens, rows.lengths.tolist(), strict=True)
    return torch.cat([model(input_ids=row[None, :n], use_cache=False).logits[0] for row, n in each])


class _eager:
    """The model's own attention within a block."""

    def __init__(self, model: Any) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model

    def __enter__(self) -> None:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation(self._before)
