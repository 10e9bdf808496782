"""``rl-fn plan``: the memory of a run before it starts."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_bridge.atomic import write_json
from rl_bridge.memory.budget import START
from rl_bridge.memory.options import pipeline_of
from rl_bridge.memory.planning import knobs, largest_micro_batch, plan
from rl_bridge.memory.sizes import parse_bytes, shown_bytes
from rl_bridge.memory.sources import ConfigSource
from rl_bridge.memory.tables import as_json, knob_lines, plan_lines
from rl_bridge.memory.workload import Workload
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.pipelines.training import load_model, load_rows


def run(words: Sequence[str]) -> int:
    """Run ``rl-fn plan`` with these words; returns the exit status: 1 where ``--fits`` cannot be kept."""
    arguments, rest = _parser().parse_known_args(words)
    if arguments.config == "policy":
        from rl_bridge.cli import TRAINERS, load, parse

        pipeline = parse(load(TRAINERS["policy"].default), rest, prog="rl-fn plan policy")
    else:
        if rest:
            raise ValueError(f"a run's config.json has its options already: rl-fn plan takes no {' '.join(rest)}")
        pipeline = pipeline_of(Path(arguments.config))
    if pipeline.micro_batch_tokens == "auto":
        pipeline = replace(pipeline, micro_batch_tokens=START)
    room = None if arguments.fits is None else parse_bytes(arguments.fits)
    source, workload = _workload(pipeline, arguments.prompt_tokens)
    found = plan(pipeline, source, workload)
    print(
        f"{workload.prompts} prompts of {workload.prompt_tokens} tokens, {workload.responses} completions each of "
        f"{workload.new_tokens}; micro-batches of {pipeline.micro_batch_tokens} tokens"
    )
    print("\n".join(plan_lines(found)))
    written = {"workload": vars(workload), "phases": as_json(found)}
    if not arguments.no_knobs:
        changed = list(knobs(pipeline, source, workload, found))
        print("\n".join(["", *knob_lines(changed)]))
        written["knobs"] = {knob.option: knob.saves for knob in changed}
    status = 0
    if room is not None:
        status = _print_largest(pipeline, source, workload, room, written)
    if arguments.json is not None:
        write_json(arguments.json, written)
    return status


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="rl-fn plan",
        description="Bytes by phase and component, without loading the model. With policy, all further options are "
        "those of rl-fn train policy.",
        allow_abbrev=False,
    )
    made.add_argument("config", help="policy, a run's folder, or its config.json")
    made.add_argument("--prompt-tokens", type=int, help="of the longest prompt; without it the data is asked")
    made.add_argument("--fits", metavar="24GiB", help="find the most --micro-batch-tokens that fit into so much")
    made.add_argument("--no-knobs", action="store_true", help="leave out what other options would save")
    made.add_argument("--json", type=Path, help="a file for the numbers")
    return made


def _workload(pipeline: PolicyPipeline, prompt_tokens: int | None) -> tuple[ModelSource, Workload]:
    """The model's structure, and the longest step of the run."""
    if pipeline.model is None:
        rows = [row for part in load_rows(pipeline) for row in part]
        source, tokenizer = load_model(pipeline, rows)
        longest = max(len(tokenizer(str(row["prompt"])).input_ids) for row in rows)
    elif prompt_tokens is None:
        raise ValueError("the length of the prompts is not known before the data is read: give --prompt-tokens")
    else:
        source, longest = ConfigSource(pipeline.model), prompt_tokens
    config = pipeline.policy
    workload = Workload(
        prompts=config.prompts_per_step,
        responses=config.responses_per_prompt,
        prompt_tokens=prompt_tokens or longest,
        new_tokens=config.sampling.max_new_tokens,
    )
    return source, workload


def _print_largest(pipeline: PolicyPipeline, source: ModelSource, workload: Workload, room: int, written: dict) -> int:
    largest = largest_micro_batch(pipeline, source, workload, room)
    if largest is None:
        print(f"\nnot even one row at a time fits into {shown_bytes(room)}")
        return 1
    tokens, made = largest
    print(f"\n--micro-batch-tokens {tokens} is the most that fits into {shown_bytes(room)}: {shown_bytes(made.bytes)}")
    written["fits"] = {"room": room, "micro_batch_tokens": tokens, "bytes": made.bytes}
    return 0
