"""GRPO on two-digit addition in JAX alone: flax, optax, orbax, one jitted loop over a mesh. No torch is imported.

    python experiments/grpo_jax.py                      # warm start from random weights, then GRPO
    python experiments/grpo_jax.py --model DIR          # from a Hugging Face folder (Qwen2 over the task's characters)
    python experiments/grpo_jax.py --name X --resume    # go on after Ctrl-C

Writes runs/NAME: metrics.jsonl, summary.json, learning_curve.png, checkpoints/, and model/ in Hugging Face format.
"""

import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import Mesh

import rl_fn
from experiments.flax_qwen2 import Qwen2, Qwen2Config, load_pretrained, save_pretrained
from experiments.flax_qwen2.learner import Learner, Problems, Sampling, build_learner, data_mesh
from experiments.flax_qwen2.run_folder import RunFolder
from rl_bridge.data.tasks import ALPHABET, Operation, arithmetic_rows, split_rows

PAD, EOS = 0, 1
TOKEN_IDS = {character: i + 2 for i, character in enumerate(ALPHABET)}
OPERATIONS: tuple[Operation, ...] = ("+", "-")
RECIPES = {"grpo": rl_fn.recipes.grpo, "dapo": rl_fn.recipes.dapo, "rloo": rl_fn.recipes.rloo}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "grpo_jax"
    output: Path = Path("runs")
    seed: int = 0
    resume: bool = False
    model: Path | None = None
    """Hugging Face folder; None starts from random weights."""
    operations: Literal["+-", "+", "-"] = "+"
    """With "-" too the same budget ends near 0.88 held-out, not above 0.95."""
    held_out: int = 600
    warm_start_steps: int | None = None
    """Supervised steps; None is 125 from random weights and 0 for a given model."""
    warm_start_batch: int = 256
    warm_start_learning_rate: float = 2e-3
    steps: int = 320
    prompts: int = 384
    """Prompts sampled a step."""
    groups: int = 96
    """Groups trained on a step: of the prompts sampled, those whose completions differ in reward."""
    samples: int = 4
    objective: Literal["grpo", "dapo", "rloo"] = "dapo"
    kl_coef: float = 0.0
    """β of the KL penalty towards the model at the start of GRPO."""
    learning_rate: float = 2.5e-4
    """At 5e-4 the first steps lose accuracy instead of gaining it."""
    warmup: int = 10
    temperature: float = 1.0
    max_new_tokens: int = 4
    devices: int | None = None
    """Devices to share each batch between; None takes all."""
    evaluate_every: int = 20
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        if min(self.steps, self.prompts, self.groups, self.evaluate_every, self.checkpoint_every) < 1:
            raise ValueError(f"counts must be ≥ 1, got {self}")
        if self.samples < 2 or self.groups > self.prompts:
            raise ValueError(f"needs samples ≥ 2 and groups ≤ prompts, got {self}")

    @property
    def supervised_steps(self) -> int:
        default = 0 if self.model else 125
        return default if self.warm_start_steps is None else self.warm_start_steps


def encode(text: str) -> list[int]:
    return [TOKEN_IDS[character] for character in text]


def problems(rows: Sequence[dict[str, str]], max_new_tokens: int) -> Problems:
    """Rows as token ids: prompts padded on the left, completions with their end of sequence on the right."""
    prompts, answers = [encode(row["prompt"]) for row in rows], [[*encode(row["answer"]), EOS] for row in rows]
    longest = max(map(len, answers))
    if longest > max_new_tokens:
        raise ValueError(f"the longest answer has {longest} tokens, max_new_tokens is {max_new_tokens}")
    width = max(map(len, prompts))
    left = np.array([[PAD] * (width - len(ids)) + ids for ids in prompts], np.int32)
    right = np.array([ids + [PAD] * (max_new_tokens - len(ids)) for ids in answers], np.int32)
    return Problems(left, left != PAD, right, right != PAD)  # pyright: ignore[reportArgumentType]


def batch_at(data: Problems, step: int, size: int, seed: int) -> Problems:
    """The batch of a step: epoch after epoch in a new order each, a function of seed and step alone."""
    count = len(data.prompts)
    if size > count:
        raise ValueError(f"a batch of {size} needs as many rows, there are {count}")
    epoch, within = divmod(step, count // size)
    rows = np.random.default_rng([seed, epoch]).permutation(count)[within * size : (within + 1) * size]
    return Problems(*(x[rows] for x in data))


def accuracy(learner: Learner, parameters: nnx.State, data: Problems, devices: int) -> float:
    """Greedy exact match; rows are repeated to fill the last device and not counted."""
    count = len(data.prompts)
    rows = np.arange(-(-count // devices) * devices) % count
    return float(np.sum(learner.correct(parameters, Problems(*(x[rows] for x in data)))[:count])) / count


def starting_model(config: Config) -> Qwen2:
    shape = Qwen2Config(vocab_size=len(ALPHABET) + 2, initializer_range=0.05, pad_token_id=PAD, eos_token_id=EOS)
    if config.model is None:
        return nnx.jit(lambda: Qwen2(shape, nnx.Rngs(config.seed)))()
    model = load_pretrained(config.model)
    found = (model.config.vocab_size, model.config.pad_token_id, model.config.eos_token_id)
    if found != (shape.vocab_size, PAD, EOS):
        raise ValueError(
            f"{config.model}: vocabulary size, padding and end of sequence must be "
            f"{(shape.vocab_size, PAD, EOS)} (the characters {ALPHABET!r} from id 2), got {found}"
        )
    tokenizer = config.model / "tokenizer.json"
    if tokenizer.exists():
        vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
        if any(vocabulary.get(character) != i for character, i in TOKEN_IDS.items()):
            raise ValueError(f"{tokenizer} numbers the characters otherwise: {vocabulary}, not {TOKEN_IDS}")
    return model


def optimizers(config: Config) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """AdamW with warm-up and linear decay: for the warm start, then for GRPO."""

    def adamw(peak: float, warmup: int, steps: int, last: float, b2: float) -> optax.GradientTransformation:
        rising = optax.linear_schedule(peak / warmup, peak, warmup)
        schedule = optax.join_schedules([rising, optax.linear_schedule(peak, last * peak, steps - warmup)], [warmup])
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=b2, weight_decay=0.0))

    return (
        adamw(config.warm_start_learning_rate, 50, 500, 0.0, 0.95),
        adamw(config.learning_rate, config.warmup, config.steps, 0.1, 0.99),
    )


def new_learner(config: Config, graph: nnx.GraphDef, objective: rl_fn.Objective, mesh: Mesh) -> Learner:
    for name in ("warm_start_batch", "prompts", "groups"):
        if getattr(config, name) % mesh.size:
            raise ValueError(f"{name} must be a multiple of the {mesh.size} devices, got {getattr(config, name)}")
    sampling = Sampling(
        samples=config.samples,
        groups=config.groups,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
    )
    supervised, optimizer = optimizers(config)
    return build_learner(
        graph, mesh, objective=objective, sampling=sampling, supervised_optimizer=supervised, optimizer=optimizer
    )


def run(config: Config) -> dict[str, Any]:
    """The whole experiment; returns what summary.json holds. Raises KeyboardInterrupt after a requested stop."""
    rows = arithmetic_rows([op for op in OPERATIONS if op in config.operations])
    train, held_out = (problems(part, config.max_new_tokens) for part in split_rows(rows, config.held_out, config.seed))
    mesh = data_mesh(config.devices)
    estimator = "k2" if config.objective == "rloo" else "k3"
    kl = rl_fn.components.KL(estimator, config.kl_coef) if config.kl_coef else None
    objective = RECIPES[config.objective]().replace(kl=kl)
    if config.groups < config.prompts:
        # More prompts are sampled than are trained on: dynamic sampling chooses, whatever the recipe.
        objective = objective.replace(dynamic_sampling=rl_fn.components.DynamicSampling())
    graph, parameters = nnx.split(starting_model(config), nnx.Param)
    learner = new_learner(config, graph, objective, mesh)
    warm, total = config.supervised_steps, config.supervised_steps + config.steps
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("resume", "output", "devices")}
    run = RunFolder(
        config.output / config.name, settings, resume=config.resume, checkpoint_every=config.checkpoint_every
    )

    def evaluate(parameters: nnx.State) -> float:
        return accuracy(learner, parameters, held_out, mesh.size)

    # A checkpoint after the last step of the warm start still has the warm start's optimizer.
    state, first = run.restore(lambda done: learner.fresh(parameters, supervised=warm > 0 and done <= warm))
    reference = None
    if objective.kl is not None and first > warm:
        reference = learner.place(nnx.state(load_pretrained(run.folder / "reference"), nnx.Param))
    for step in run.steps(first, total):
        if step < warm:
            batch = batch_at(train, step, config.warm_start_batch, config.seed)
            state, metrics = learner.supervised(state, batch)
            run.done(step, "warm start", metrics, state, tokens=batch.completion_mask.sum())
            continue
        if step == warm:
            state = learner.fresh(state.parameters, supervised=False)
            run.cached_results["accuracy_before"] = evaluate(state.parameters)
            if objective.kl is not None:
                # A copy, because updates consume the parameters they are given; on disk too, for --resume.
                reference = jax.tree.map(lambda x: x.copy(), state.parameters)
                save_pretrained(nnx.merge(graph, reference), run.folder / "reference", like=config.model)
        batch = batch_at(train, step - warm, config.prompts, config.seed + 1)
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        rollout, sampled = learner.rollout(state.parameters, reference, key, batch)
        state, metrics = learner.update(state, rollout)
        metrics |= sampled
        if (step + 1 - warm) % config.evaluate_every == 0 or step + 1 == total:
            metrics["held_out"] = evaluate(state.parameters)
        run.done(step, "grpo", metrics, state, tokens=metrics.pop("tokens"))

    accuracy_after = evaluate(state.parameters)
    save_pretrained(nnx.merge(graph, state.parameters), run.folder / "model", like=config.model)
    wall, cpu = run.seconds
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
    summary = {
        **run.cached_results,
        "accuracy_after": accuracy_after,
        "held_out": config.held_out,
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "seed": config.seed,
        "parameters": sum(x.size for x in jax.tree.leaves(state.parameters)),
        "objective": objective.explain(),
        "devices": [device.device_kind for device in mesh.devices.flat],
        "config": json.loads(json.dumps(settings, default=str)),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
    run.finish(summary)
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    try:
        summary = run(config)
    except KeyboardInterrupt as stopped:
        print(stopped, file=sys.stderr)
        return 130
    before, after, seconds = (summary[name] for name in ("accuracy_before", "accuracy_after", "seconds"))
    print(f"held-out accuracy {before:.2f} → {after:.2f} in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
