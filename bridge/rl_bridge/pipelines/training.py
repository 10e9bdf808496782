"""Options of every training pipeline, and the rows, model and processes that they make."""

import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given, remark, tell
from rl_bridge.data.census import SAME_PROMPT, Census, SourceCensus
from rl_bridge.data.messages import require_characters
from rl_bridge.data.row_readers import reader_fingerprint
from rl_bridge.data.rows import policy_row, read_rows
from rl_bridge.data.tasks import arithmetic_rows, prompt_of, split_rows
from rl_bridge.engines import Mesh
from rl_bridge.engines.engine import Turns
from rl_bridge.executors import Executor
from rl_bridge.models.chat_templates import dates_of, read_template, use_template
from rl_bridge.models.exported_files import ExportDtype
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import FreezingSource, ModelSource, PretrainedSource
from rl_bridge.models.own_class import factory_of, is_file_of_class
from rl_bridge.models.own_model import OwnSource, class_fingerprint, own_source
from rl_bridge.models.pretrained import new_for_rows, pretrained, tokenizer_of
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.checkpointing import Activations
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines, PlacementOptions, set_threads
from rl_bridge.run.options import MAY_CHANGE, RunOptions, require_used
from rl_bridge.run.provenance import UNDIVIDED, of_folder, of_rows, of_weights


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Adapters in place of the whole model; the exported model has them merged."""

    rank: int = 0
    """0 trains the whole model."""
    alpha: float | None = None
    """The adapters' scale is alpha / rank. None is twice the rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Ends of module names, as q_proj, and of weights with their module, as experts.down_proj. all-linear is every
    linear layer but the output embeddings and the router of a mixture of experts."""
    use_rslora: bool = False
    """The scale is alpha / √rank."""

    def __post_init__(self) -> None:
        """Refuse a rank or a scale that no adapter has, and constants without a rank.

        ``target_modules`` may be a list, a set or one text, which is no pattern.
        """
        check_options(self)
        targets: Any = self.target_modules
        targets = (targets,) if isinstance(targets, str) else targets
        targets = sorted(targets, key=str) if isinstance(targets, set | frozenset) else targets
        if not isinstance(targets, list | tuple) or not all(isinstance(target, str) for target in targets):
            raise TypeError(f"target_modules is ends of module names, as ('q_proj',), got {targets!r}")
        if joined := [target for target in targets if "," in target]:
            raise ValueError(
                f"target_modules are separated by spaces, as {' '.join(joined[0].replace(',', ' ').split())}, got "
                f"{joined[0]!r}"
            )
        object.__setattr__(self, "target_modules", tuple(targets))
        if self.rank < 0 or not (self.alpha is None or self.alpha > 0) or not self.target_modules:
            raise ValueError(
                f"need rank ≥ 0, alpha > 0 and target_modules, got {given(self, 'rank', 'alpha', 'target_modules')}"
            )
        if not self.rank:
            names = ("alpha", "target_modules", "use_rslora")
            require_used(self, names, "without a --lora.rank of at least 1", part="lora")

    def of(self, source: ModelSource, seed: int) -> ModelSource:
        """The source with adapters, or itself."""
        if not self.rank:
            return source
        targets = self.target_modules[0] if self.target_modules == ("all-linear",) else self.target_modules
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return LoRASource(source, self.rank, alpha, targets, self.use_rslora, seed=seed)  # type: ignore[return-value]


def trained_part(source: ModelSource, lora: LoRAOptions, freeze: Sequence[str], seed: int) -> ModelSource:
    """The model with its trained part: adapters in it or all of it, without the frozen parameters.

    Raises:
        ValueError: a target module or a freeze pattern that the model does not have.
    """
    adapted = lora.of(source, seed)
    trained = FreezingSource(adapted, tuple(freeze)) if freeze else adapted
    with torch.device("meta"):
        trained.empty()  # A name that the model does not have is refused before workers are made.
    return trained


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions, PlacementOptions):
    """Options of every training command. Without ``model`` it is a tiny new Qwen2."""

    seed: int = 0
    """Seed of new weights, of the order of the rows and of every draw."""
    model: str | None = None
    """Folder or hub id in Hugging Face format; or FILE.py:Class, a model class of your own (docs/your_own_loop.md)."""
    tokenizer: str | None = field(default=None, metadata=MAY_CHANGE)
    """Folder or hub id of the tokenizer of a model class of your own."""
    weights: Path | None = field(default=None, metadata=MAY_CHANGE)
    """Weights of a model class of your own: a safetensors file, or a folder as a run exports it. None draws new ones
    from the seed."""
    chat_template: Path | None = field(default=None, metadata=MAY_CHANGE)
    """File with a Jinja chat template in place of the tokenizer's; the exported tokenizer has it."""
    export_dtype: ExportDtype = field(default="input", metadata=MAY_CHANGE)
    """Numbers of the exported model. input: those of the folder that it came from, weight by weight."""
    data: str | None = field(default=None, metadata=MAY_CHANGE)
    """JSON, JSONL, CSV, Parquet or Arrow file, or a Hugging Face dataset; or FILE.py:function, which yields rows.
    None is two-digit addition."""
    eval_data: str | None = field(default=None, metadata=MAY_CHANGE)
    """Held-out rows; None holds ``held_out`` rows of ``data`` back."""
    held_out: int = 600
    """Rows of ``data`` that are not trained on and measure the model; where this default is more than half, a fifth."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    lora: LoRAOptions = LoRAOptions()
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained, as model.embed_tokens.* or *.layers.[0-3].*"""
    micro_batch_tokens: int | Literal["auto"] = 16384
    """Tokens of one forward pass of the trainer. More cost memory, and fewer cost time. auto: as many as fit."""
    packing: bool = False
    """The trainer's rows lie one behind another instead of each padded: faster where their lengths differ much."""
    share_prefixes: bool = True
    """Completions of one prompt compute the prompt once. The results are the same, from fewer tokens."""
    softcap: float | None = None
    """A cap of the logits beyond the model's own, for policy and reference alike."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the trainer's matrix products."""
    activations: Activations = "keep"
    """Activations that a layer keeps for its backward pass. keep: all. selective: results of matrix products and
    attention, the rest is computed again. every_other: every second layer keeps its inputs alone, and is computed
    again. full: every layer. offload: all, in host memory. offload_inputs: full, with the inputs in host memory."""
    gradient_checkpointing: bool = False
    """The same as ``activations`` full."""
    offload: Literal["none", "phases", "always"] = "none"
    """phases: models and optimisers wait in host memory while another one works. always: sharded weights, gradients
    and optimisers stay in host memory, and a layer comes to the device when it computes."""
    threads: int | None = field(default=None, metadata=MAY_CHANGE)
    """CPU threads of each worker; None takes torch's default, and a resumed run the number that it began with."""

    def __post_init__(self) -> None:
        """Refuse counts below 1, two policies of activations, and what nothing would read."""
        super().__post_init__()
        self.scoring()
        if self.gradient_checkpointing and self.activations not in ("keep", "full"):
            raise ValueError(f"gradient_checkpointing is activations full: it excludes {self.activations}")
        if self.chat_template is not None and self.model is None:
            raise ValueError(f"chat_template {self.chat_template} needs a model: a new one has texts for prompts")
        if self.of_class != (self.tokenizer is not None) or (self.weights is not None and not self.of_class):
            raise ValueError(
                "a model class of your own is --model FILE.py:Class with --tokenizer, and --weights if there are any; "
                f"every other model has both in its folder: got {given(self, 'model', 'tokenizer', 'weights')}"
            )
        for option in ("model", "data", "eval_data", "tokenizer"):
            if getattr(self, option) == "":
                raise ValueError(f"{option} names a file, a folder or an id of the hub, and is empty")
            require_characters(getattr(self, option), option)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2³² − 1, got {self.seed}")
        if self.chat_template == Path():
            raise ValueError("chat_template names a file, and is empty or the working directory")
        for option in ("held_out", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}")
        if self.threads is not None and self.threads > (most := max(1024, os.cpu_count() or 1)):
            raise ValueError(f"threads must be at most {most}, got {self.threads}")
        if self.eval_data is not None:
            require_used(self, ("held_out",), f"beside --eval-data {self.eval_data}, whose rows are all held out")

    def scoring(self, temperature: float = 1.0) -> ScoringConfig:
        """How the models of this run compute probabilities; supervision has no temperature but 1."""
        return ScoringConfig(
            temperature=temperature,
            micro_batch_tokens=self.micro_batch_tokens,
            packing=self.packing,
            share_prefixes=self.share_prefixes,
            softcap=self.softcap,
            dtype=self.dtype,
        )

    @property
    def of_class(self) -> bool:
        """Whether the model is of a class of the user's own."""
        return self.model is not None and is_file_of_class(self.model)

    def models(self) -> dict[str, str | None]:
        """Role → folder or hub id, of the models that the run begins with."""
        return {"model": self.model}

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str]:
        """Fingerprints of the models' files, the chat template's text and the rows' readers, which a resume compares.

        The place of a file does not count. ``tokenizer``: the model's, for the date that its chat template writes.
        """
        names = {role: name for role, name in self.models().items() if name is not None}
        fingerprints: dict[str, str] = {} if tokenizer is None else dates_of(tokenizer)
        if self.of_class:
            fingerprints |= own_fingerprints(*own_model(self))
            del names["model"]
        fingerprints |= {role: of_folder(PretrainedSource(name).folder(), tell) for role, name in names.items()}
        if self.chat_template is not None:
            fingerprints["chat template"] = of_rows([{"text": read_template(self.chat_template)}])
        return (
            fingerprints | reader_fingerprint(self.data) | reader_fingerprint(self.eval_data, "held-out rows' reader")
        )

    def parallel(self) -> ParallelConfig:
        """Recomputation and offloading of the trained models."""
        activations: Activations = "full" if self.gradient_checkpointing else self.activations
        return ParallelConfig(activations=activations, cpu_offload=self.offload == "always")

    def trained(self, source: ModelSource) -> ModelSource:
        """The model with its trained part; see ``trained_part``."""
        return trained_part(source, self.lora, self.freeze, self.seed)

    def engines(self, executor: Executor, mesh: Mesh, source: ModelSource, run: str = "") -> Engines:
        """The maker of a run's engines, with these options."""
        trained, turns = self.trained(source), Turns() if self.offload == "phases" else None
        return Engines(executor, mesh, source, self.parallel(), run=run, trained=trained, turns=turns)


ADDITION = "two-digit addition"


def load_rows(
    options: TrainingOptions,
    fields: Sequence[str] = ("prompt", "answer"),
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = policy_row,
    census: Census | None = None,
) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out, each with the ``fields`` and in the form that ``check`` returns.

    ``census`` gets the numbers of both sources, and of rows that are left out.
    """
    census = Census() if census is None else census
    if options.data is None:
        rows: list[dict] = arithmetic_rows(["+"])
        census.data = SourceCensus(name=ADDITION, read=len(rows))
    else:
        rows = read_rows(options.data, fields=fields, check=check, census=census.data)
    if options.eval_data is not None:
        census.eval_data = SourceCensus()
        held_out = read_rows(options.eval_data, fields=fields, check=check, census=census.eval_data)
        remark_on_shared(rows, held_out)
        census.content = of_rows(rows, held_out)
        return rows, held_out
    census.content = of_rows(rows)
    return split(options, rows, census)


def undivided(census: Census) -> dict[str, str]:
    """The fingerprint of all rows before their split, where it was taken; runs of several seeds share it.

    >>> undivided(Census())
    {}
    """
    return {} if census.content is None else {UNDIVIDED: census.content}


def split(options: TrainingOptions, rows: Sequence[dict], census: Census) -> tuple[list[dict], list[dict]]:
    """(Rows to train on, ``options.held_out`` rows held out), of prompts that differ.

    Where the trainer's own number is more than half of the prompts, a fifth is held out, and a remark says so. Rows
    that are left out are counted, and so are too few to train on.

    Raises:
        ValueError: the rows have too few prompts.
    """
    source, count = census.data.name, options.held_out
    prompts = len(set(map(prompt_of, rows)))
    if count == type(options).held_out and 2 * count > prompts:
        count = max(1, prompts // 5)
        own = options.held_out
        remark(f"{source}: {prompts} distinct prompts, of which {count} are held out and not {own}: --held-out N")
    try:
        train, held_out = split_rows(rows, count, options.seed)
    except ValueError as error:
        raise ValueError(f"{source}: {error}: give a smaller --held-out, or --eval-data FILE") from error
    census.data.leave_out(SAME_PROMPT, len(rows) - len(train) - len(held_out))
    if len(train) < len(held_out):
        remark(
            f"{source}: {len(train)} rows are trained on and {len(held_out)} held out: a smaller --held-out, or "
            "--eval-data FILE, leaves more to train on"
        )
    return train, held_out


def remark_on_shared(trained: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]]) -> None:
    """Count the rows of --eval-data whose prompts are trained on, whatever other columns say of them."""
    trained_prompts, prompts = set(map(prompt_of, trained)), list(map(prompt_of, held_out))
    if both := sum(prompt in trained_prompts for prompt in prompts):
        remark(
            f"{both} of {len(prompts)} rows of --eval-data have the prompt of a row of --data: they are no held-out "
            "rows"
        )


def load_model(options: TrainingOptions, rows: Sequence[dict]) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """The loaded model, without adapters, and its tokenizer. A new model's tokenizer can spell all of ``rows``.

    The tokenizer has the options' chat template, if there is one.
    """
    if options.model is None:
        return new_for_rows(rows, seed=options.seed)
    source, tokenizer = own_model(options) if options.of_class else pretrained(options.model)
    if options.chat_template is not None:
        use_template(tokenizer, options.chat_template)
    return source, tokenizer


def own_model(options: TrainingOptions) -> tuple[OwnSource, PreTrainedTokenizerBase]:
    """The model class of ``--model FILE.py:Class`` and its tokenizer.

    Raises:
        FileNotFoundError: no such file of the class or of weights.
        TypeError, ValueError: the class lacks what a model has; weights or tokenizer do not fit it.
    """
    assert options.model is not None and options.tokenizer is not None
    tokenizer = tokenizer_of(options.tokenizer, alone=True)
    return own_source(factory_of(options.model), tokenizer, weights=options.weights, seed=options.seed), tokenizer


def own_fingerprints(source: OwnSource, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the file of a model class, of its weights, and of the tokenizer, wherever these lie."""
    marks = {"model": class_fingerprint(source.factory), "tokenizer": of_rows([_outline(tokenizer)])}
    return marks if source.weights is None else marks | {"weights": of_weights(Path(source.weights), tell)}


def _outline(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that decides which tokens a text becomes."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) if isinstance(tokenizer, PreTrainedTokenizerFast) else {}
    names = ("normalizer", "pre_tokenizer", "model", "added_tokens")
    return {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **{name: parts.get(name) for name in names},
    }


def prepare_processes(options: TrainingOptions, executor: Executor) -> None:
    """Set the threads of all processes and the seed of this one. Comes before a model is made."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        threads = {slot.index: (options.threads,) for slot in executor.slots}
        executor.call(set_threads, threads, what="set_threads", timeout=60)
    seed_everything(options.seed)


def seed_everything(seed: int) -> None:
    """Seed every global generator: a user's model or reward may sample from any of them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make a result."""
    packages = ("rl-fn", "jax", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def summary_of(options: TrainingOptions, source: ModelSource, notes: Sequence[str]) -> dict[str, Any]:
    """The part of a summary that every run has, besides the census of its rows."""
    with torch.device("meta"):
        whole, trained = source.empty(), options.trained(source).empty()
    return {
        "notes": list(notes),
        "seed": options.seed,
        # Tied ones count once.
        "parameters": sum(parameter.numel() for parameter in whole.parameters()),
        "trained_parameters": sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad),
        "versions": versions(),
    }
