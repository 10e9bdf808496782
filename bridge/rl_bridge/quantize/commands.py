"""``rl-fn quantize profile | setup | verify``, with the arguments of flashrl's commands."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_bridge.atomic import replacing, write_json
from rl_bridge.rollout.vllm.flashrl import FUNCTIONS, read_configs, setting_of
from rl_bridge.terminal import say

CONFIG = Path("~/.flashrl_config.yaml")


def run(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    arguments = parser().parse_args(list(words))
    command: Callable[[Any], int] = arguments.command
    return command(arguments)


def parser() -> argparse.ArgumentParser:
    """All three commands."""
    made = argparse.ArgumentParser(prog="rl-fn quantize", description="Quantised rollouts: what they cost in accuracy.")
    commands = made.add_subparsers(required=True, metavar="profile | setup | verify")

    p = commands.add_parser("profile", help="compare a quantised checkpoint with fresh scales of its model")
    p.add_argument("-m", "--model", help="folder or hub id of the model before quantisation")
    p.add_argument("-q", "-qm", "--quantized", required=True, help="folder or hub id of the quantised model")
    p.add_argument("-o", "--output", required=True, type=Path, help="JSON file for the profile")
    p.add_argument("--fn", choices=("int8", "fp8"), default="int8", help="what the codes are")
    p.set_defaults(command=_profile)

    p = commands.add_parser("setup", help="write a file for FLASHRL_CONFIG")
    p.add_argument("-m", "--model", help="a model that engines start from, instead of the trainer's")
    p.add_argument("-p", "--profile", help="only the weights that this profile lists are quantised")
    p.add_argument("--fn", choices=list(FUNCTIONS), default="int8", help="what quantises")
    p.add_argument("-o", "--config-output", type=Path, default=CONFIG, help=f"the file; {CONFIG} without")
    p.add_argument("-a", "--append", action="store_true", help="one more data-parallel rank in a file that is there")
    p.add_argument("columns", nargs="*", metavar="NAME=VALUE", help="more fields of the entry")
    p.set_defaults(command=_setup)

    p = commands.add_parser("verify", help="the error budget of a quantised rollout on given prompts")
    p.add_argument("-m", "--model", required=True, help="folder or hub id of the model")
    p.add_argument("--fn", choices=list(FUNCTIONS), default="int8", help="what quantises")
    p.add_argument("--prompts", type=Path, help="a text file with a prompt a line, or JSON lines with a field prompt")
    p.add_argument("--engine", choices=("in_process", "vllm", "none"), help="what samples; none measures weights alone")
    p.add_argument("--samples", type=int, default=4, help="completions a prompt")
    p.add_argument("--tokens", type=int, default=128, help="of a completion")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--cap", type=float, default=2.0, help="of truncated importance sampling")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--most", type=float, help="nats: exit status 1 where the mean log-probability error is above")
    p.add_argument("--json", type=Path, help="file for the numbers")
    p.set_defaults(command=_verify)
    return made


def _profile(arguments: argparse.Namespace) -> int:
    from rl_bridge.quantize.profile import profile, table

    if arguments.fn == "int8" and arguments.model is None:
        raise ValueError("profile --fn int8 compares with the model before quantisation: give --model")
    found = profile(arguments.model, arguments.quantized, arguments.fn)
    write_json(arguments.output, found)
    say("\n".join([*table(found), f"profile written to {arguments.output}"]))
    return 0


def _setup(arguments: argparse.Namespace) -> int:
    path = arguments.config_output.expanduser()
    given = {name: getattr(arguments, name) for name in ("fn", "model", "profile")}
    entry = {name: value for name, value in given.items() if value is not None}
    for column in arguments.columns:
        name, sign, value = column.partition("=")
        if not sign:
            raise ValueError(f"expected NAME=VALUE, got {column!r}")
        entry[name] = yaml.safe_load(value)
    setting_of(entry, "setup")
    if arguments.profile is not None and "weights" not in json.loads(Path(arguments.profile).read_text()):
        raise ValueError(f"{arguments.profile} is no profile of rl-fn quantize profile: it lists no weights")
    configs = read_configs(path) if arguments.append and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump({"configs": [*configs, entry]}, sort_keys=False))
    say(f"{path}: {len(configs) + 1} data-parallel ranks in turn; export FLASHRL_CONFIG={path}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from rl_bridge.quantize.verify import lines, verify

    precision = FUNCTIONS[arguments.fn]
    engine = arguments.engine or ("in_process" if precision == "int8" and arguments.prompts else "none")
    if engine != "none" and arguments.prompts is None:
        raise ValueError(f"--engine {engine} samples completions: give --prompts FILE")
    found = verify(
        arguments.model,
        precision,
        engine=engine,
        prompts=[] if arguments.prompts is None else read_prompts(arguments.prompts),
        samples=arguments.samples,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        cap=arguments.cap,
        seed=arguments.seed,
    )
    if arguments.json is not None:
        write_json(arguments.json, found)
    say("\n".join(lines(found)))
    above = arguments.most is not None and found.get("rollout", {}).get("mean", 0.0) > arguments.most
    if above:
        say(f"the mean log-probability error is above {arguments.most:g} nats")
    return int(above)


def read_prompts(path: Path) -> list[Any]:
    """A prompt a line; of JSON lines the field ``prompt``, text or messages.

    Raises:
        ValueError: there is none.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in lines]
        if any("prompt" not in row for row in rows):
            raise ValueError(f"{path} has a row without a field 'prompt'")
        lines = [row["prompt"] for row in rows]
    if not lines:
        raise ValueError(f"{path} has no prompts")
    return lines
