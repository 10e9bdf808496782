"""Full configs of known-good runs; start from one with ``dataclasses.replace`` or command-line flags."""

from collections.abc import Sequence
from pathlib import Path

from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.own_class import is_file_of_class
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import objective_options
from rl_train.policy_options import PolicyPipeline, WarmStart

EXPORTED = ("model", "best", "warm_start")
"""Names of the folders that a run exports: the name of the run's own folder says more."""


def policy(words: Sequence[str] = ()) -> PolicyPipeline:
    """The config that ``rl-fn train policy`` begins with, by the words of the command.

    ``pretrained_config`` where they name a model, else ``quickstart``.

    >>> policy(["--model", "org/Small-1B", "--data", "problems.jsonl"]).name
    'Small-1B-problems'
    """
    model = _value_of("--model", words)
    if model is None:
        return quickstart()
    adapters = _value_of("--lora.rank", words) not in (None, "0")
    own = {"tokenizer": _value_of("--tokenizer", words), "weights": _value_of("--weights", words)}
    return pretrained_config(model, _value_of("--data", words), adapters=adapters, **own)


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The last value of an option among the words of a command."""
    value = None
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and place + 1 < len(words):
            value = words[place + 1]
    return value


def pretrained_config(
    model: str,
    data: str | None = None,
    *,
    adapters: bool = False,
    tokenizer: str | None = None,
    weights: str | None = None,
) -> PolicyPipeline:
    """GRPO of a user's model: no supervised steps, completions of up to 512 tokens, a low learning rate.

    ``tokenizer`` and ``weights`` are those of a class of the user's own.

    The learning rate is DAPO's (Yu et al., 2025) and TRL's, 1e-6 after a warm-up. With ``adapters`` the rate is ten
    times as high, as LoRA's best rates are about ten times those of all weights (Schulman et al., LoRA Without Regret,
    2025).
    """
    return PolicyPipeline(
        name=_name_of(model, data),
        model=model,
        tokenizer=tokenizer,
        weights=None if weights is None else Path(weights),
        data=data,
        sft=WarmStart(rows_per_step=32, optimizer=OptimizerConfig(learning_rate=1e-5, beta2=0.999)),
        policy=PolicyConfig(
            steps=200,
            prompts_per_step=16,
            evaluate_every=25,
            sampling=SamplingParams(n=8, max_new_tokens=512),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5 if adapters else 1e-6, decay="constant", beta2=0.999),
        objective=objective_options("dapo"),
    )


def _name_of(model: str, data: str | None) -> str:
    """The name of a run, by its model and data: runs/first/model and problems.jsonl make first-problems."""
    folder = Path(model.rpartition(":")[2] if is_file_of_class(model) else model)
    model_name = folder.parent.name if folder.name in EXPORTED and folder.parent.name else folder.name
    parts = [model_name, "" if data is None else Path(data.partition("@")[0]).stem]
    return "-".join(filter(None, parts)).strip(".")[:100] or "policy"


def quickstart() -> PolicyPipeline:
    """GRPO of a 1 M-parameter Qwen2 on two-digit addition: under five minutes on two CPU cores.

    The warm start ends at its full learning rate, before it has learned the task.
    """
    return PolicyPipeline(
        name="addition",
        sft=WarmStart(
            steps=135,
            rows_per_step=256,
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup=50, decay="constant", beta2=0.99),
        ),
        policy=PolicyConfig(
            steps=240,
            prompts_per_step=192,
            updates_per_step=2,
            evaluate_every=20,
            # At the same cost, four completions of 192 prompts learn faster than eight of 96,
            # and eight of 96 faster than sixteen of 48.
            sampling=SamplingParams(n=4, max_new_tokens=5),
        ),
        # Five times this rate learns more slowly: the advantages of a group are too noisy for that.
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup=10, final=0.2, beta2=0.99),
        objective=objective_options("dapo"),
    )
