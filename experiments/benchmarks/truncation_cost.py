"""What truncated sampling costs beside plain sampling, of a whole decoding step in process and of the sampler alone.

python experiments/benchmarks/truncation_cost.py    # writes experiments/results/truncation_cost/

A small Qwen2 (hidden 64, 2 layers) of random weights draws 64 rows of tokens. CPU seconds of one thread, which other
processes disturb less than the clock. Each pair is a plain generation and a truncated one, one after the other; of the
ratios of the pairs the median and the range are told. ``--before FILE``: the JSON of another tree, for its column.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.benchmarks.executor_overhead import _processor
from rl_bridge.data.trajectory import SamplingParams, requests_of
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.rollout import InProcessRollout
from rl_kernels import sample

OUT = Path(__file__).parents[1] / "results" / "truncation_cost"
CUTS = {"top-p 0.9": {"top_p": 0.9}, "top-k 20": {"top_k": 20}, "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9}}
VOCABULARIES, ROWS = (4000, 32_000), 64
SHARPNESS = {"flat": 1.0, "peaked": 150.0}
"""Factor of the head's weights."""


def rollout_of(vocabulary: int, sharpness: float) -> InProcessRollout:
    """A model whose logits spread as the factor says."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(vocab_size=vocabulary, **sizes, num_key_value_heads=1, tie_word_embeddings=False)
    config.eos_token_id = None
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(sharpness)
    model.generation_config.eos_token_id = None
    return InProcessRollout(StateSource(model), character_tokenizer("0123456789"))


def ratios(plain: Callable[[], object], cut: Callable[[], object], pairs: int) -> dict[str, float]:
    """Milliseconds of the plain one in the median, and the ratio of each pair."""
    seconds: dict[Callable[[], object], list[float]] = {plain: [], cut: []}
    for number in range(pairs + 1):
        for call in (plain, cut) if number % 2 else (cut, plain):
            start = time.process_time()
            call()
            seconds[call].append(time.process_time() - start)
    found = sorted(b / a for a, b in zip(seconds[plain][1:], seconds[cut][1:], strict=True))  # the first warms up
    names = {"ratio": statistics.median(found), "least": found[0], "most": found[-1]}
    return {name: round(value, 2) for name, value in names.items()} | {
        "plain_ms": round(1e3 * statistics.median(seconds[plain][1:]), 1)
    }


def rows_of(vocabulary: int, kind: str, pairs: int, tokens: int) -> list[dict]:
    """The step and the sampler, each cut."""
    rollout = rollout_of(vocabulary, SHARPNESS[kind])
    logits = (0.16 if kind == "flat" else 24.0) * torch.randn(
        ROWS, vocabulary, generator=torch.Generator().manual_seed(1)
    )
    made = []

    def generated(**cuts):
        sampling = SamplingParams(max_new_tokens=tokens, n=ROWS, **cuts)
        return lambda: rollout.generate(requests_of([[3, 4, 5, 6]], 0), sampling)

    def sampled(**cuts):
        seeds = torch.arange(ROWS)
        return lambda: [sample(logits, seed=seeds, position=place, **cuts) for place in range(tokens)]

    for name, cuts in CUTS.items():
        for what, call in (("step", generated), ("sampler", sampled)):
            found = ratios(call(), call(**cuts), pairs)
            found["plain_ms"] = round(found["plain_ms"] / tokens, 2)
            made.append({"what": what, "vocabulary": vocabulary, "logits": kind, "cut": name, **found})
            print(json.dumps(made[-1]), flush=True)
    return made


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--before", type=Path, help="JSON of another tree")
    parser.add_argument("--output", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for vocabulary in options.vocabularies
        for kind in SHARPNESS
        for row in rows_of(vocabulary, kind, options.pairs, options.tokens)
    ]
    old = [] if options.before is None else json.loads(options.before.read_text())["rows"]
    before = {_key(row): row for row in old}
    described = {
        "command": "python experiments/benchmarks/truncation_cost.py",
        "pairs": options.pairs,
        "tokens": options.tokens,
        "rows_drawn": ROWS,
        "machine": _processor(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "rows": rows,
        "before": [before.get(_key(row)) for row in rows],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "truncation_cost.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    (options.output / "README.md").write_text(table(described), encoding="utf-8")
    print(table(described))


def _key(row: dict) -> tuple:
    return row["what"], row["vocabulary"], row["logits"], row["cut"]


def table(described: dict) -> str:
    """One line a cut."""
    lines = [
        "# What truncated sampling costs",
        "",
        f"{described['machine']}, one thread; Python {described['python']}, torch {described['torch']},",
        f"transformers {described['transformers']}. {described['rows_drawn']} rows, {described['pairs']} pairs of",
        f"{described['tokens']} tokens a row. CPU time over that of plain sampling: median (range) of the pairs.",
        "",
        "| of | vocabulary | logits | cut | plain | times plain | before |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, old in zip(described["rows"], described["before"], strict=True):
        cells = [row["what"], str(row["vocabulary"]), row["logits"], row["cut"], f"{row['plain_ms']} ms"]
        cells += [f"{found['ratio']} ({found['least']} to {found['most']})" if found else "" for found in (row, old)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
