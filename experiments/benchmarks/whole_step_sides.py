"""One side of the whole-step benchmark, in a process of its own: a GRPO step of this library's, or one of TRL's.

Both start from the same folder, see the same prompts in the same order and have the same reward, objective, optimiser
and threads. ``whole_step.py`` starts this file; it prints nothing but a JSON object on its last line.
"""

import argparse
import json
import resource
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

LEARNING_RATE = 2e-4
VLLM: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 1.0}
"""Of the engine, where vLLM draws."""


@dataclass(frozen=True)
class Setting:
    """A model and the size of a step."""

    prompts: int
    completions: int
    max_new_tokens: int
    fused_loss: bool
    """Of this library: worth it where the head is a large part of the model."""


SETTINGS = {"tiny": Setting(48, 16, 8, False), "smollm2": Setting(8, 8, 32, True)}


@dataclass
class Steps:
    """Measurements of a process, a number a step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    """Seconds of the step until completions are scored; the rest is the update."""
    tokens: list[int] = field(default_factory=list)
    """Of prompts and completions, without padding."""
    reward: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    """Seconds since the first step began."""


def graded(completion: str, row: dict[str, Any]) -> float:
    """A reward that differs within nearly every group, so that no row of a step can be left out."""
    return zlib.crc32(completion.encode()) % 11 / 10


def exact(completion: str, row: dict[str, Any]) -> float:
    """1 for the row's answer."""
    return float(completion.strip() == row["answer"])


REWARDS = {"graded": graded, "exact": exact}


def rows_of(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    """The first ``count`` rows of the data, again from the start where these are too few."""
    rows = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return [rows[i % len(rows)] for i in range(count)]


def ours(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Steps of this library, as ``run_policy`` makes them."""
    import rl_bridge
    from rl_bridge.data.token_batch import collate
    from rl_bridge.data.trajectory import SamplingParams
    from rl_bridge.engines import Mesh, NeedParallel
    from rl_bridge.functional import from_jax
    from rl_bridge.models.pretrained import pretrained
    from rl_bridge.modules.scoring import ScoringConfig
    from rl_bridge.modules.trainable import OptimizerConfig
    from rl_bridge.parallel.config import ParallelConfig
    from rl_bridge.pipelines.placement import Engines
    from rl_bridge.pipelines.rollout_options import RolloutOptions
    from rl_bridge.rollout.vllm import VLLMOptions
    from rl_fn import Rollouts
    from rl_fn.objectives.dialects import trl

    executor = rl_bridge.init("local")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objective, reward = trl({}), REWARDS[arguments.reward]
    optimizer = OptimizerConfig(
        learning_rate=LEARNING_RATE, warmup=0, decay="constant", beta1=0.9, beta2=0.999, max_grad_norm=1.0
    )
    source, tokenizer = pretrained(str(arguments.folder / arguments.model))
    pad, scoring = tokenizer.pad_token_id, ScoringConfig(micro_batch_tokens=arguments.micro_batch_tokens)
    advantages_of, selection_of = from_jax(objective.advantages), from_jax(objective.selection)
    denominator_of = from_jax(objective.denominator)
    batches = _batches(arguments, setting)
    found, parts = Steps(), {}
    assert isinstance(pad, int)
    with Engines(executor, Mesh(), source, ParallelConfig(), run="benchmark") as engines:
        vllm = VLLMOptions(**VLLM) if arguments.rollout == "vllm" else VLLMOptions()
        rollout = engines.rollout(tokenizer, RolloutOptions(backend=arguments.rollout, vllm=vllm))
        policy = engines.policy(optimizer, objective, updates=10**6, scoring=scoring, fused_loss=setting.fused_loss)

        def sampled(number: int) -> tuple[Any, Any]:
            policy.sync_weights(rollout)
            rows = next(batches)
            params = SamplingParams(max_new_tokens=setting.max_new_tokens, n=setting.completions, seed=number)
            trajectories = rollout.generate([row["prompt"] for row in rows], params)
            rewards = [reward(t.completion, rows[i // setting.completions]) for i, t in enumerate(trajectories)]
            return trajectories, torch.tensor(rewards).view(len(rows), -1)

        def updated(trajectories: Any, rewards: torch.Tensor) -> float:
            batch = collate(trajectories, pad)
            of_group: Any = (rewards, batch.mask.view(*rewards.shape, -1))
            rollouts = Rollouts(*of_group)
            advantages = advantages_of(rollouts).advantages
            computed, counted = selection_of(rollouts, advantages)
            batch = batch._replace(advantages=advantages.flatten(0, 1), old_logprobs=batch.rollout_logprobs)
            policy.train_step(
                NeedParallel(batch.rows(computed.flatten())), float(denominator_of(counted.flatten(0, 1)))
            )
            start = time.perf_counter()
            policy.optimizer_step()
            return time.perf_counter() - start

        begin = time.perf_counter()
        optimizer_seconds = []
        while _goes_on(found, arguments, begin):
            wall, cpu = time.perf_counter(), time.process_time()
            trajectories, rewards = sampled(len(found.wall))
            sampling = time.perf_counter() - wall
            optimizer_seconds.append(updated(trajectories, rewards))
            _add(found, wall, cpu, sampling, sum(len(t.tokens) for t in trajectories), float(rewards.mean()), begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if arguments.profile:
            trajectories, rewards = sampled(len(found.wall))
            parts = _profiled(lambda: updated(trajectories, rewards), optimizer_seconds[-1])
    return {"steps": asdict(found), "peak_kib": peak, "before_kib": before, "parts": parts}


def _profiled(update: Any, optimizer_seconds: float) -> dict[str, float]:
    """Parts of an update's time: the head, torch's other operations, the optimiser, and Python between all of these."""
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update()
    wall = time.perf_counter() - start
    events = profile.key_averages()
    head = sum(event.cpu_time_total for event in events if event.key.startswith(("rl_kernels::", "_Fused"))) / 1e6
    everything = sum(event.self_cpu_time_total for event in events) / 1e6
    return {
        "head": head / wall,
        "optimizer": optimizer_seconds / wall,
        "trunk": max(0.0, everything - head - optimizer_seconds) / wall,
        "python": max(0.0, wall - everything) / wall,
    }


def theirs(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Steps of TRL's GRPOTrainer."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder, found, reward = arguments.folder / arguments.model, Steps(), REWARDS[arguments.reward]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    per_step, rows = setting.prompts * setting.completions, list(_rows(arguments, setting))

    def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [reward(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]

    class Timed(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            output = super()._generate_and_score_completions(inputs)
            self.sampling = time.perf_counter() - start
            self.counted = int(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            mean = trainer._metrics["train"]["reward"][-1]
            _add(found, *self.start, trainer.sampling, trainer.counted, mean, self.begin)
            control.should_training_stop = not _goes_on(found, arguments, self.begin)

    passes = arguments.passes
    config = trl.GRPOConfig(
        output_dir=str(arguments.folder / "trl"),
        per_device_train_batch_size=per_step // passes,
        gradient_accumulation_steps=passes,
        num_generations=setting.completions,
        max_completion_length=setting.max_new_tokens,
        max_steps=arguments.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_vllm=arguments.rollout == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=VLLM["max_model_len"],
    )
    trainer = Timed(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"steps": asdict(found), "peak_kib": peak, "before_kib": before, "parts": {}}


def _rows(arguments: argparse.Namespace, setting: Setting) -> Sequence[dict[str, Any]]:
    return rows_of(arguments.folder, arguments.model, setting.prompts * arguments.steps)


def _batches(arguments: argparse.Namespace, setting: Setting) -> Iterator[Sequence[dict[str, Any]]]:
    rows, size = [*_rows(arguments, setting), *_rows(arguments, setting)], setting.prompts
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _goes_on(found: Steps, arguments: argparse.Namespace, begin: float) -> bool:
    over = arguments.seconds is not None and time.perf_counter() - begin >= arguments.seconds
    return len(found.wall) < arguments.steps and not over


def _add(found: Steps, wall: float, cpu: float, sampling: float, tokens: int, reward: float, begin: float) -> None:
    now = time.perf_counter()
    found.wall.append(now - wall)
    found.cpu.append(time.process_time() - cpu)
    found.sampling.append(sampling)
    found.tokens.append(tokens)
    found.reward.append(reward)
    found.end.append(now - begin)


def main() -> None:
    """Measure one side and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["ours", "trl"])
    parser.add_argument("model", choices=sorted(SETTINGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--reward", choices=sorted(REWARDS), default="graded")
    parser.add_argument("--rollout", choices=["in_process", "vllm"], default="in_process", help="TRL: its own or vLLM")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    setting = SETTINGS[arguments.model]
    if arguments.prompts:
        setting = replace(setting, prompts=arguments.prompts)
    found = (ours if arguments.side == "ours" else theirs)(arguments, setting)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
