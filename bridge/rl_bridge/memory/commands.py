"""``rl-fn plan``: the memory of a run before it starts."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_bridge.atomic import write_json
from rl_bridge.memory.budget import START
from rl_bridge.memory.lengths import shown, workload_of
from rl_bridge.memory.meshes import mesh_of, started_with
from rl_bridge.memory.options import pipeline_of
from rl_bridge.memory.planning import Load, Pipeline, knobs, largest_micro_batch, plan
from rl_bridge.memory.sizes import parse_bytes, shown_bytes
from rl_bridge.memory.tables import as_json, knob_lines, plan_lines
from rl_bridge.memory.vllm_rollout import engine_of
from rl_bridge.models.source import ModelSource
from rl_bridge.terminal import say


def run(words: Sequence[str]) -> int:
    """Run ``rl-fn plan`` with these words; returns the exit status: 1 where ``--fits`` cannot be kept."""
    arguments, rest = _parser().parse_known_args(words)
    from rl_bridge.cli import TRAINERS, load, parse

    if arguments.config in TRAINERS:
        trainer = arguments.config
        pipeline = parse(load(TRAINERS[trainer].default), rest, prog=f"rl-fn plan {trainer}")
    else:
        if rest:
            raise ValueError(f"a run's config.json has its options already: rl-fn plan takes no {' '.join(rest)}")
        path = Path(arguments.config)
        pipeline = pipeline_of(path)
        pipeline = replace(pipeline, workers=pipeline.workers or started_with(path))
    if arguments.workers is not None:
        if arguments.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {arguments.workers}")
        pipeline = replace(pipeline, workers=arguments.workers)
    mesh = mesh_of(pipeline)
    if pipeline.micro_batch_tokens == "auto":
        pipeline = replace(pipeline, micro_batch_tokens=START)
    room = None if arguments.fits is None else _room(arguments.fits)
    source, workload = workload_of(pipeline, arguments.prompt_tokens, arguments.completion_tokens)
    found = plan(pipeline, source, workload)
    say(f"{shown(workload)}; micro-batches of {pipeline.micro_batch_tokens} tokens")
    say("a run of one worker" if mesh.size == 1 else f"one of {mesh.size} workers, {mesh}")
    say("\n".join(plan_lines(found)))
    written: dict[str, Any] = {"workload": vars(workload), "mesh": vars(mesh), "phases": as_json(found)}
    if (engine := engine_of(pipeline, source, workload)) is not None:
        say("\n".join(engine.lines()))
        written["rollout"] = engine.numbers()
    if not arguments.no_knobs:
        changed = list(knobs(pipeline, source, workload, found))
        say("\n".join(["", *knob_lines(changed)]))
        written["knobs"] = {knob.option: knob.saves for knob in changed}
    status = 0
    if room is not None:
        status = _print_largest(pipeline, source, workload, room, written)
    if arguments.json is not None:
        write_json(arguments.json, written)
    return status


def _room(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--fits {error}") from None


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="rl-fn plan",
        description="Bytes by phase and component, without loading the model. With a trainer's name, all "
        "further options are those of rl-fn train.",
        allow_abbrev=False,
    )
    made.add_argument("config", help="a trainer of rl-fn train, a run's folder, or its config.json")
    made.add_argument("--workers", type=int, help="processes of the run; without it what its options or its folder say")
    made.add_argument(
        "--prompt-tokens", type=int, help="of the longest prompt; needed with --model, whose data is not read"
    )
    made.add_argument("--completion-tokens", type=int, help="of the longest completion; a policy has its own option")
    made.add_argument("--fits", metavar="24GiB", help="find the most --micro-batch-tokens that fit into so much")
    made.add_argument("--no-knobs", action="store_true", help="leave out what other options would save")
    made.add_argument("--json", type=Path, help="a file for the numbers")
    return made


def _print_largest(pipeline: Pipeline, source: ModelSource, workload: Load, room: int, written: dict) -> int:
    largest = largest_micro_batch(pipeline, source, workload, room)
    if largest is None:
        say(f"\nnot even one row at a time fits into {shown_bytes(room)}")
        return 1
    tokens, made = largest
    say(f"\n--micro-batch-tokens {tokens} is the most that fits into {shown_bytes(room)}: {shown_bytes(made.bytes)}")
    written["fits"] = {"room": room, "micro_batch_tokens": tokens, "bytes": made.bytes}
    return 0
