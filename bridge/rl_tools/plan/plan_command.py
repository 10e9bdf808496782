"""``rl-fn plan``: a run's options and the lengths of its rows read, and the plan printed."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_bridge.common.files import write_json
from rl_bridge.common.terminal import say
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.memory.token_budget import START
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.row_checks import longest_sequence, prompted
from rl_bridge.pipelines.training import load_model, load_rows, own_model
from rl_bridge.rollout.conversations import Limits
from rl_tools.number_options import Parser
from rl_tools.plan.planning import Knob, Load, Pipeline, Plan, knobs, largest_micro_batch, plan
from rl_tools.plan.rehearsal import ConfigSource
from rl_tools.plan.steps import Rows, Supervision
from rl_tools.plan.vllm_memory import engine_of
from rl_tools.plan.workload import Workload, mesh_of, started_with
from rl_tools.profile.live_bytes import COMPONENTS
from rl_tools.profile.timeline import parse_bytes, shown_bytes
from rl_train import compared, sft
from rl_train.policy_inputs import rows_of
from rl_train.policy_options import PolicyPipeline
from rl_train.sft import SFTPipeline

# Lengths of a run's rows: as the user says, or as the data has them.


def workload_of(
    pipeline: Pipeline, prompt_tokens: int | None, completion_tokens: int | None
) -> tuple[ModelSource, Load]:
    """The model's structure, and the longest step of the run.

    Raises:
        ValueError: a model of the user's, whose data is not read, and a length that was not given; a length below 1;
            rows that are longer than the model has positions.
    """
    for option, tokens in (("--prompt-tokens", prompt_tokens), ("--completion-tokens", completion_tokens)):
        if tokens is not None and tokens < 1:
            raise ValueError(f"{option} must be at least 1, got {tokens}")
    if isinstance(pipeline, PolicyPipeline):
        if completion_tokens is not None:
            raise ValueError("completions of a policy have --policy.sampling.max-new-tokens")
        source, load = _of_policy(pipeline, prompt_tokens)
    else:
        source, load = _of_supervision(pipeline, prompt_tokens, completion_tokens)
    completion = "--policy.sampling.max-new-tokens" if isinstance(pipeline, PolicyPipeline) else "--completion-tokens"
    with torch.device("meta"):
        longest = longest_sequence(source.empty())
    if longest is not None and load.prompt_tokens + load.new_tokens > longest:
        raise ValueError(
            f"--prompt-tokens {load.prompt_tokens} and {completion} {load.new_tokens} are a row of "
            f"{load.prompt_tokens + load.new_tokens} tokens, and the model has {longest} positions: give fewer"
        )
    return source, load


def shown(load: Load) -> str:
    """The rows of a step in words."""
    if isinstance(load, Workload):
        return (
            f"{load.prompts} prompts of {load.prompt_tokens} tokens, {load.responses} completions each of "
            f"{load.new_tokens}"
        )
    completions = "a completion" if load.completions == 1 else f"{load.completions} completions each"
    return f"{load.rows} rows of a prompt of {load.prompt_tokens} tokens and {completions} of {load.new_tokens}"


def _of_policy(pipeline: PolicyPipeline, prompt_tokens: int | None) -> tuple[ModelSource, Workload]:
    if pipeline.model is None:
        rows = [row for part in load_rows(pipeline) for row in part]
        source, tokenizer = load_model(pipeline, rows)
        longest = max(len(tokenizer(str(row["prompt"])).input_ids) for row in rows)
    elif prompt_tokens is None:
        raise ValueError("the length of the prompts is not known before the data is read: give --prompt-tokens")
    else:
        source, longest = _structure(pipeline), prompt_tokens
    config, prompt = pipeline.policy, prompt_tokens or longest
    conversation = conversation_of(pipeline, source, prompt)
    return source, Workload(
        prompts=config.prompts_per_step,
        responses=config.sampling.n,
        prompt_tokens=prompt,
        new_tokens=config.sampling.max_new_tokens if conversation is None else max(1, conversation.tokens - prompt),
    )


class ConversationSize(NamedTuple):
    """The longest conversation with an environment: its ``tokens``, and the limit that holds for the environment, too.

    ``limit`` None: the policy's turns are counted, and what the environment says is not known.
    """

    tokens: int
    limit: str | None
    turns: str
    """The policy's turns in words."""

    def line(self) -> str:
        """The content of a row in words."""
        if self.limit is None:
            return (
                f"a row is the prompt and {self.turns}; what the environment says is not counted: "
                "--max-trajectory-tokens bounds both together"
            )
        return f"a row is a conversation of {self.tokens} tokens ({self.limit}), the environment's included"


def conversation_of(pipeline: Pipeline, source: ModelSource, prompt_tokens: int) -> ConversationSize | None:
    """The longest conversation of a policy with its environment; None for a run without one.

    Raises:
        ValueError: conversations may be longer than the model has positions, or an engine holds.
    """
    if not isinstance(pipeline, PolicyPipeline) or pipeline.environment is None:
        return None
    new_tokens, most = pipeline.policy.sampling.max_new_tokens, pipeline.max_trajectory_tokens
    engine = None if pipeline.rollout.backend == "in_process" else pipeline.rollout.vllm.max_model_len
    with torch.device("meta"):
        longest = longest_sequence(source.empty(), engine)
    Limits(max_turns=pipeline.max_turns, turn_tokens=new_tokens, all_tokens=most, longest=longest)
    turns = f"{pipeline.max_turns} turns of {new_tokens} tokens"
    if most is not None:
        return ConversationSize(most, "--max-trajectory-tokens", turns)
    drawn = prompt_tokens + pipeline.max_turns * new_tokens
    if longest is not None and longest <= drawn:
        return ConversationSize(longest, "the model's positions, or what the engine holds", turns)
    return ConversationSize(drawn, None, turns)


def _of_supervision(
    pipeline: Supervision, prompt_tokens: int | None, completion_tokens: int | None
) -> tuple[ModelSource, Rows]:
    """Without a model it is tiny and new, and its data is read; of a comparison the loss says the completions."""
    completions, held_out = 1, pipeline.held_out
    if not isinstance(pipeline, SFTPipeline):
        completions = {"triples": 3}.get(pipeline.loss.build().form, 2)
    if pipeline.model is not None:
        if prompt_tokens is None or completion_tokens is None:
            raise ValueError("the rows are not read: give --prompt-tokens and --completion-tokens of the longest")
        source = _structure(pipeline)
        prompt, new = prompt_tokens, completion_tokens
    else:
        source, trajectories, held_out, completions = _read(pipeline)
        prompt, new = _longest(trajectories)
    return source, Rows(
        rows=pipeline.rows_per_step,
        held_out=held_out,
        prompt_tokens=prompt_tokens or prompt,
        new_tokens=completion_tokens or new,
        completions=completions,
    )


def _structure(pipeline: Pipeline) -> ModelSource:
    """The model of the options, of which no weights are read: a class of the user's own, or that of a config.json."""
    assert pipeline.model is not None
    return own_model(pipeline)[0] if pipeline.of_class else ConfigSource(pipeline.model)


def _read(pipeline: Supervision) -> tuple[ModelSource, list[Trajectory], int, int]:
    """The new model, all completions of the data, how many rows are held out, completions of the widest row."""
    if isinstance(pipeline, SFTPipeline):
        inputs = sft.inputs_of(pipeline)
        return inputs.model.source, [*inputs.rows.rows, *inputs.held_out.rows], len(inputs.held_out), 1
    inputs = compared.inputs_of(pipeline, pipeline.loss.build())
    examples = [*inputs.rows.rows, *inputs.held_out.rows]
    trajectories = [trajectory for example in examples for trajectory in example.completions]
    widest = max(len(example.completions) for example in examples)
    return inputs.model.source, trajectories, len(inputs.held_out), widest


def _longest(trajectories: Iterable[Trajectory]) -> tuple[int, int]:
    """Tokens before the first that counts, and the others, of the longest."""
    longest = max(trajectories, key=lambda trajectory: len(trajectory.tokens))
    first = list(longest.loss_mask).index(True)
    return first, len(longest.tokens) - first


# A plan as lines of text, and as JSON.


def plan_lines(plan: Plan) -> list[str]:
    """A table: a line for each phase, a column for each component that any of them has."""
    names = [name for name in COMPONENTS if any(peak.components.get(name) for peak in plan.phases.values())]
    rows = [["phase", "peak", *names]]
    for phase, peak in plan.phases.items():
        rows.append([phase, *(shown_bytes(size) for size in (peak.bytes, *(peak.components.get(n, 0) for n in names)))])
    peak = plan.phases[plan.phase]
    at = f", at {peak.line}" if peak.line else ""
    return [*_aligned(rows), f"the most is {shown_bytes(peak.bytes)}, in {plan.phase}{at}"]


def knob_lines(knobs: Iterable[Knob]) -> list[str]:
    """A table: what each option saves at the peak, the largest first."""
    rows = [
        [knob.option, shown_bytes(knob.saves), shown_bytes(knob.plan.bytes), knob.plan.phase]
        for knob in sorted(knobs, key=lambda knob: -knob.saves)
    ]
    return _aligned([["option", "saves", "the most is then", "in"], *rows])


def as_json(plan: Plan) -> dict[str, Any]:
    """{phase: {bytes, components, line}}."""
    return {name: peak._asdict() for name, peak in plan.phases.items()}


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


# ``rl-fn plan``: the memory of a run before it starts.


def run(words: Sequence[str]) -> int:
    """Run ``rl-fn plan`` with these words; returns the exit status: 1 where ``--fits`` cannot be kept."""
    arguments, rest = _parser().parse_known_args(words)
    from rl_tools.command_words import is_run_file
    from rl_tools.trainer_options import TRAINERS
    from rl_tools.trainers import config_of

    pipeline = config_of([arguments.config, *rest], "plan")[1]
    if is_run_file(arguments.config) and arguments.config not in TRAINERS:
        pipeline = replace(pipeline, workers=pipeline.workers or started_with(Path(arguments.config)))
    if arguments.workers is not None:
        if arguments.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {arguments.workers}")
        pipeline = replace(pipeline, workers=arguments.workers)
    pipeline = counted(pipeline)
    source, workload, phases, numbers = print_plan(pipeline, arguments.prompt_tokens, arguments.completion_tokens)
    if not arguments.no_knobs:
        changed = list(knobs(pipeline, source, workload, phases))
        say("\n".join(["", *knob_lines(changed)]))
        numbers["knobs"] = {knob.option: knob.saves for knob in changed}
    status = 0
    if arguments.fits is not None:
        status = _print_largest(pipeline, source, workload, arguments.fits, numbers)
    if arguments.json is not None:
        write_json(arguments.json, numbers)
    return status


def counted(pipeline: Pipeline) -> Pipeline:
    """The pipeline with a number of tokens in a micro-batch: ``auto`` begins with one."""
    return replace(pipeline, micro_batch_tokens=START) if pipeline.micro_batch_tokens == "auto" else pipeline


def read_lengths(pipeline: Pipeline) -> tuple[int | None, int | None]:
    """Tokens of the longest prompt and of the longest completion in the data; None for what is known without it."""
    if pipeline.model is None:
        return None, None
    if not isinstance(pipeline, PolicyPipeline):
        return _longest(_read(pipeline)[1])
    rows = [row for part in rows_of(pipeline) for row in part]
    tokens = prompted(load_model(pipeline, rows)[1])
    return max(len(tokens(row)[1]) for row in rows), None


def print_plan(
    pipeline: Pipeline, prompt_tokens: int | None, completion_tokens: int | None
) -> tuple[ModelSource, Load, Plan, dict[str, Any]]:
    """Print the memory of each phase; returns the model's structure, the longest step, the plan, and all as numbers."""
    mesh = mesh_of(pipeline)
    source, workload = workload_of(pipeline, prompt_tokens, completion_tokens)
    phases = plan(pipeline, source, workload)
    say(f"{shown(workload)}; micro-batches of {pipeline.micro_batch_tokens} tokens")
    conversation = conversation_of(pipeline, source, workload.prompt_tokens)
    if conversation is not None:
        say(conversation.line())
    say("a run of one worker" if mesh.size == 1 else f"one of {mesh.size} workers, {mesh}")
    say("\n".join(plan_lines(phases)))
    numbers: dict[str, Any] = {"workload": vars(workload), "mesh": vars(mesh), "phases": as_json(phases)}
    if conversation is not None:
        numbers["conversation"] = {"tokens": conversation.tokens, "with_environment": conversation.limit is not None}
    if (engine := engine_of(pipeline, source, workload)) is not None:
        say("\n".join(engine.lines()))
        numbers["rollout"] = engine.numbers()
    return source, workload, phases, numbers


def _room(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rl-fn plan",
        description="Bytes by phase and component, without loading the model. All further "
        "options are those of rl-fn train.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a trainer of rl-fn train, a run's folder, or a run file")
    parser.add_argument(
        "--workers", type=int, help="processes of the run; without it what its options or its folder say"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, help="of the longest prompt; needed with --model, whose data is not read"
    )
    parser.add_argument("--completion-tokens", type=int, help="of the longest completion; a policy has its own option")
    parser.add_argument(
        "--fits", type=_room, metavar="24GiB", help="find the most --micro-batch-tokens that fit into so much"
    )
    parser.add_argument("--no-knobs", action="store_true", help="leave out what other options would save")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    return parser


def _print_largest(pipeline: Pipeline, source: ModelSource, workload: Load, room: int, numbers: dict) -> int:
    largest = largest_micro_batch(pipeline, source, workload, room)
    if largest is None:
        say(f"\nnot even one row at a time fits into {shown_bytes(room)}")
        return 1
    tokens, phases = largest
    say(f"\n--micro-batch-tokens {tokens} is the most that fits into {shown_bytes(room)}: {shown_bytes(phases.bytes)}")
    numbers["fits"] = {"room": room, "micro_batch_tokens": tokens, "bytes": phases.bytes}
    return 0
