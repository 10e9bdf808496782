"""The options of each trainer of ``rl-fn train``, by their names on the command line and in run files."""

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any

from rl_bridge.run.run_toml import dashed, is_fixed


@dataclass(frozen=True)
class Trainer:
    """A line of ``rl-fn train``'s table. Nothing of a trainer is loaded before ``load``."""

    default: str
    """``module:name`` of a function that returns the default config, or of the config's class."""
    run: str
    """``module:name`` of the function (config, observers) that runs a config to its end and returns the summary.

    ``summary["result"]`` is one sentence about the run, and ``summary["seconds"]`` its time.
    """
    about: str


TRAINERS = {
    "sft": Trainer(
        "rl_train.sft:SFTPipeline",
        "rl_train.sft:run_sft",
        "supervised fine-tuning on conversations, or prompts with responses; the best model on held-out rows is "
        "exported.",
    ),
    "reward-model": Trainer(
        "rl_train.reward_model:RewardModelPipeline",
        "rl_train.reward_model:run_reward_model",
        "a model that scores completions, from pairs or ranked lists; loss:plackett-luce is for lists.",
    ),
    "preference": Trainer(
        "rl_train.preference:PreferencePipeline",
        "rl_train.preference:run_preference",
        "a policy from preferred and rejected completions: DPO. loss:simpo takes SimPO with its own options.",
    ),
    "policy": Trainer(
        "rl_train.policy_configs:policy",
        "rl_train.policy:run_policy",
        "post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit arithmetic "
        "and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.",
    ),
}


def load(place: str) -> Any:
    """The object that ``module:name`` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


OWN = ("seed", "name", "output", "resume", "resume-anyway", "dry-run")
"""Options of a trainer that the study sets itself."""
_ELSEWHERE = {
    "model": "pretrain pretrained model-name model-name-or-path model-path base-model actor-model checkpoint",
    "tokenizer": "tokenizer-name tokenizer-path",
    "data": "dataset dataset-name dataset-path train-files train-data train-file prompt-data data-path input",
    "eval-data": "eval-dataset val-files val-data validation-file eval-file test-data",
    "held-out": "eval-size test-size val-size validation-split",
    "output": "output-dir save-path save-dir default-local-dir ckpt-dir",
    "name": "run-name experiment-name wandb-run-name",
    "resume": "resume-from-checkpoint resume-from load-checkpoint resume-mode",
    "trackers": "report-to logger loggers use-wandb wandb use-tensorboard tracker",
    "tracker-project": "project project-name wandb-project",
    "checkpoint-every": "save-steps save-freq save-interval save-every save-strategy",
    "keep-checkpoints": "save-total-limit max-ckpt-num max-checkpoints",
    "evaluate-every": "eval-steps test-freq eval-freq eval-interval eval-every eval-strategy",
    "epochs": "epoch num-train-epochs num-epochs max-epochs total-epochs",
    "steps": "max-steps total-training-steps num-steps train-steps iterations max-iters",
    "rows-per-step": "batch-size train-batch-size per-device-train-batch-size global-batch-size bs "
    "gradient-accumulation-steps accumulation-steps ppo-mini-batch-size mini-batch-size",
    "prompts-per-step": "batch-size train-batch-size per-device-train-batch-size rollout-batch-size global-batch-size "
    "bs gradient-accumulation-steps accumulation-steps gen-batch-size ppo-mini-batch-size mini-batch-size",
    "updates-per-step": "num-mini-batches",
    "micro-batch-tokens": "micro-batch-size micro-train-batch-size ppo-max-token-len-per-gpu max-tokens-per-batch",
    "sampling.n": "num-generations n-samples-per-prompt num-return-sequences group-size rollout-n num-samples "
    "responses-per-prompt completions-per-prompt samples-per-prompt num-completions",
    "max-new-tokens": "max-completion-length max-response-length generate-max-len response-length max-tokens",
    "max-length": "max-seq-length max-seq-len max-len max-prompt-length prompt-max-len cutoff-len",
    "learning-rate": "lr actor-learning-rate",
    "weight-decay": "wd",
    "max-grad-norm": "grad-clip gradient-clipping clip-grad max-norm grad-norm",
    "warmup": "warmup-steps warmup-ratio warmup-proportion lr-warmup-steps lr-warmup-ratio",
    "decay": "lr-scheduler-type lr-scheduler scheduler lr-schedule",
    "beta1": "adam-beta1",
    "beta2": "adam-beta2",
    "dtype": "bf16 fp16 precision torch-dtype param-dtype model-dtype mixed-precision",
    "objective": "adv-estimator advantage-estimator algorithm algo policy-loss loss-type loss-mode",
    "loss": "loss-type preference-loss",
    "kl.coef": "kl kl-coef init-kl-coef kl-loss-coef beta kl-beta",
    "loss.beta": "beta dpo-beta",
    "clip-low": "epsilon eps-clip clip-ratio cliprange clip-range clip-eps clip-ratio-low",
    "clip-high": "epsilon-high clip-ratio-high eps-clip-high",
    "entropy.coef": "entropy-coeff entropy-coef ent-coef",
    "reward": "reward-funcs reward-fn reward-function reward-model reward-pretrain custom-reward-function",
    "reward-weights": "weights-of-rewards",
    "lora.rank": "lora-r lora-rank use-peft use-lora lora peft r",
    "lora.alpha": "lora-alpha",
    "lora.target-modules": "lora-target-modules target-modules",
    "activations": "activation-checkpointing",
    "gradient-checkpointing": "enable-gradient-checkpointing",
    "rollout.backend": "use-vllm vllm-mode inference-backend engine",
    "rollout.vllm.tensor-parallel-size": "vllm-tensor-parallel-size tensor-model-parallel-size tensor-parallel-size tp",
    "mesh.shard": "fsdp zero-stage deepspeed gpus n-gpus num-gpus num-processes",
    "mesh.sequence": "ring-attn-size sequence-parallel-size ulysses-sequence-parallel-size cp context-parallel-size",
    "fused-loss": "use-liger use-liger-kernel liger",
}
"""The end of an option's name here → words that other programs, and older versions, have for the same."""


@dataclass
class TrainerOptions:
    """The options of a trainer, by their names on the command line without the dashes in front."""

    kinds: dict[str, Any] = field(default_factory=dict)
    """Option → its type."""
    recipes: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Option that takes a recipe → recipe → options that this recipe has. ``objective`` → ``gspo`` → …"""
    defaults: dict[str, str] = field(default_factory=dict)
    """Option that takes a recipe → its default recipe."""
    of_recipes: dict[str, Any] = field(default_factory=dict)
    """Option of a recipe → its type; the union of them where recipes differ."""

    def of_recipe(self, name: str) -> tuple[str, set[str]] | None:
        """(The option that takes recipes, the recipes that have this option); None where it belongs to no recipe."""
        for holder, recipes in self.recipes.items():
            owners = {recipe for recipe, options in recipes.items() if name in options}
            if owners:
                return holder, owners
        return None

    def recipe_dashed(self, word: str) -> str:
        """A recipe's word as tyro has it; every other word as it is."""
        holder, _, recipe = dashed(word).partition(":")
        return dashed(word) if recipe in self.recipes.get(holder, {}) else word

    def require(self, name: str) -> None:
        """Refuse a name that is no option.

        Raises:
            ValueError: the message has the nearest names.
        """
        if name in OWN:
            raise ValueError(f"--{name} is the study's own: it cannot be searched")
        if name in self.recipes or name in self.kinds or self.of_recipe(name) is not None:
            return
        near = self.near(name)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"the trainer has no option --{name}{hint}")

    def kind(self, name: str) -> Any:
        """The type of an option, of a recipe or not; None of a name that is none."""
        return self.kinds.get(name, self.of_recipes.get(name))

    def near(self, name: str) -> list[str]:
        """Options that a name may mean, at most three."""
        return self.exact(name) or self._alike(name)

    def exact(self, name: str) -> list[str]:
        """Options whose name, last part or name in other programs this is.

        The part in front may be one that this trainer does not have: ``sft.steps`` is ``steps``.
        """
        word = dashed(name).lower()
        names = dict.fromkeys([*self.recipes, *self.names()])
        head, _, last = word.rpartition(".")
        if head in self.recipes and last in ("name", "type", "kind"):
            return [head]
        if word in names or last in names:
            return [word if word in names else last]
        options = [*self.elsewhere(word), *(option for option in names if f".{option}".endswith(f".{last}"))]
        under = [option for option in options if option.startswith(f"{head}.")] if head else []
        return list(dict.fromkeys(under or options))[:3]

    def elsewhere(self, word: str) -> list[str]:
        """Options that other programs have under the last part of a name."""
        last = word.rpartition(".")[2]
        ends = [own for own, others in _ELSEWHERE.items() if last in others.split()]
        names = dict.fromkeys([*self.recipes, *self.names()])
        return [option for end in ends for option in names if f".{option}".endswith(f".{end}")]

    def _alike(self, name: str) -> list[str]:
        """Options that are spelt nearly as a name, the nearest first."""
        word = dashed(name).lower()
        last = word.rpartition(".")[2]
        ratios = {
            option: max(
                difflib.SequenceMatcher(None, option, word).ratio(),
                difflib.SequenceMatcher(None, option.rpartition(".")[2], last).ratio() - 0.01,
            )
            for option in [*self.recipes, *self.names()]
        }
        return [option for option in sorted(ratios, key=lambda option: -ratios[option]) if ratios[option] > 0.65][:3]

    def near_recipes(self, holder: str, recipe: str) -> list[str]:
        """Recipes that are spelt nearly as a word, the nearest first."""
        return difflib.get_close_matches(dashed(recipe).lower(), self.recipes[holder])

    def names(self) -> list[str]:
        """All options that take no recipe; those of recipes last."""
        return [
            *self.kinds,
            *(name for recipes in self.recipes.values() for options in recipes.values() for name in options),
        ]

    def no_recipe(self, holder: str, recipe: str) -> str:
        """Why HOLDER:RECIPE is none of this trainer; nothing where it is one, or where no trainer has such a holder."""
        word, own = f"{holder}:{recipe}", self.recipes.get(holder, {})
        if recipe in own:
            return ""
        elsewhere = _trainers_with(holder)
        owners = [name for name, recipes in elsewhere.items() if recipe in recipes] or ([] if own else list(elsewhere))
        if owners:
            here = ", ".join(f"{part}:{name}" for part, names in self.recipes.items() for name in names)
            others = ", ".join(f"train {name}" for name in owners)
            return f"{word} is of {others}{f'; here there are {here}' if here else ''}"
        if holder == "objective" and own and ".py:" in recipe:
            return f"{word}: a loss of your own is a part of an objective, objective:grpo --objective.loss {recipe}"
        near = [f"{holder}:{name}" for name in self.near_recipes(holder, recipe)] if own else []
        all_of_them = "" if near else f"; there are {', '.join(f'{holder}:{name}' for name in own)}"
        return f"{did_you_mean(word, near)}{all_of_them}" if own else ""


def algorithms() -> dict[str, tuple[str, str]]:
    """Name of a recipe → (the trainer that has it, the option that takes it): ``grpo`` → ``("policy", "objective")``.

    No two trainers have a recipe of one name.
    """
    return {
        name: (trainer, holder)
        for holder in ("objective", "loss")
        for trainer, recipes in _trainers_with(holder).items()
        for name in recipes
    }


@lru_cache(maxsize=16)
def _trainers_with(holder: str) -> dict[str, Collection[str]]:
    """The trainers that have such recipes, each with the names of its own."""
    options = {name: options_of(load(trainer.default)()) for name, trainer in TRAINERS.items()}
    return {name: own.recipes[holder] for name, own in options.items() if holder in own.recipes}


def did_you_mean(word: str, near: Sequence[str]) -> str:
    return f"{word}: did you mean {' or '.join(near)}?" if near else f"there is no {word}"


def options_of(config: Any) -> TrainerOptions:
    """The options of a trainer by its config: an instance, or the class."""
    options = TrainerOptions()
    _walk(config if isinstance(config, type) else type(config), config, "", options)
    return options


def _walk(kind: type, config: Any, prefix: str, options: TrainerOptions) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    for option in dataclasses.fields(kind):
        if not option.init or is_fixed(option):
            continue
        name, hint = f"{prefix}{dashed(option.name)}", hints[option.name]
        value = None if isinstance(config, type) else getattr(config, option.name, None)
        if recipes := _recipes(hint):
            options.recipes[name] = {}
            for recipe, holder in recipes.items():
                inside = TrainerOptions()
                _walk(holder, holder, f"{name}.", inside)
                options.recipes[name][recipe] = set(inside.kinds)
                for inner, kind in inside.kinds.items():
                    options.of_recipes[inner] = typing.Union[options.of_recipes.get(inner, kind), kind]  # noqa: UP007
                if type(value) is holder or (value is None and _begins_as(option, holder)):
                    options.defaults[name] = recipe
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            _walk(hint, hint if value is None else value, f"{name}.", options)
        else:
            options.kinds[name] = hint


def _begins_as(option: dataclasses.Field, holder: type) -> bool:
    """Whether an option's default is a ``holder``."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory is holder or type(option.default_factory()) is holder
    return type(option.default) is holder


def _recipes(hint: Any) -> dict[str, type]:
    """Name → class, of a union of sub-commands; nothing for another type."""
    classes = {}
    for part in typing.get_args(hint):
        names = [name for note in getattr(part, "__metadata__", ()) if (name := getattr(note, "name", None))]
        if names and dataclasses.is_dataclass(kind := typing.get_args(part)[0]):
            classes[dashed(names[0])] = kind
    return classes


def in_words(kind: Any) -> str:
    """The values that an option's type has, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin in (typing.Union, UnionType):
        return " or ".join(in_words(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"an array, each {in_words(parts[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a text")


def choices_of(kind: Any) -> str:
    """The values of an option in a few letters: ``{float32,bfloat16}``, ``INT``, ``TEXT...``."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (typing.Union, UnionType):
        return "|".join(choices_of(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"{choices_of(parts[0])}..."
    return {bool: "", int: "INT", float: "NUMBER"}.get(kind, "TEXT")
