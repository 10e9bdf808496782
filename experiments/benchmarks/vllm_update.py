"""What a proved weight update of vLLM costs: its parts, one copy of the same bytes, and its share of a step.

.venv-vllm/bin/python experiments/benchmarks/vllm_update.py     # about ten minutes on two cores

The model has SmolLM2-135M's shapes and random weights. A step is the completions that vLLM draws, their scores under
the policy, and the forward and backward pass over them; the optimiser's own time is left out.
"""

# pyright: reportMissingImports=false

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_bridge.common.files import write_json
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.engines.dispatch import returns
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.rollout.vllm.client import InProcessEngine, open_in_process
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import TakesProvedWeights, UpdatedEngine
from rl_bridge.weights.source import Precision

RESULTS = Path(__file__).parents[1] / "results" / "vllm_update"
# SmolLM2-135M: config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
SHAPES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


class Policy(TokenScorer):
    """Its weights get a new version with every update."""

    updates = 0

    @returns("same")
    def weights_version(self) -> int:
        self.updates += 1
        return self.updates


class Rollout(TakesProvedWeights):
    """An engine of vLLM in this process."""

    def __init__(self, folder: Path, options: VLLMOptions) -> None:
        client = open_in_process(folder, options)
        self.updated = UpdatedEngine(client, folder, tolerance=Tolerance.of(options.precision))


class Parts:
    """Seconds by part of the updates."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, owner: Any, method: str, name: str) -> None:
        """From now on the calls of a method count."""
        call = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            with self.counted(name):
                return call(*args, **options)

        setattr(owner, method, timed)

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def each(self, name: str, updates: int) -> float:
        """Seconds a part takes in one update."""
        return sum(self.seconds.get(name, [0.0])) / updates


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def completions(client: InProcessEngine, rows: int, prompt: int, tokens: int, vocabulary: int) -> None:
    """Draw ``tokens`` tokens for each row."""
    for row in range(rows):
        ids = [(7 * place + row) % vocabulary for place in range(prompt)]
        params = client._sampling(max_tokens=tokens, seed=row, temperature=1.0)
        # On a CPU vLLM ends with a seeded prompt that it reads in pieces, as it does with the last of many prompts.
        params.seed = None
        client.add_request(f"row-{row}", {"prompt_token_ids": ids}, params)
    while client.has_unfinished_requests():
        client.step()


def learn(model: torch.nn.Module, rows: int, length: int, vocabulary: int) -> tuple[float, float]:
    """Seconds of scoring all rows, and of their forward and backward pass, eight rows at a time."""
    ids = torch.randint(vocabulary, (8, length))
    with torch.no_grad():
        scoring = seconds(lambda: [model(input_ids=ids, use_cache=False) for _ in range(rows // 8)])
    model.requires_grad_(True)

    def update() -> None:
        for _ in range(rows // 8):
            logits = model(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    training = seconds(update)
    model.zero_grad()
    model.requires_grad_(False)
    return scoring, training


def measure(precision: Precision, options: argparse.Namespace) -> dict[str, Any]:
    """One engine, some updates, one step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES,
        num_hidden_layers=options.layers,
        vocab_size=options.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    length = options.prompt + options.tokens
    engine_options = VLLMOptions(
        precision=precision, max_model_len=max(512, length), max_num_seqs=options.rows, kv_cache_gib=1.0
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        dtype = getattr(torch, engine_options.activations)
        through = write_checkpoint(StateSource(model), folder, precision, dtype=dtype)
        executor = LocalExecutor("cpu")
        engine = InferenceEngine(partial(Rollout, folder, engine_options), executor=executor, name="rollout").build()
        worker = executor._host.workers["rollout"].module
        scoring = ScoringConfig(dtype="float32" if precision == "fp32" else "bfloat16")
        policy = TrainEngine(partial(Policy, StateSource(model), scoring), executor=executor, name="policy").build()
        try:
            policy.sync_weights(engine, through=through)  # the first one compiles and touches new memory
            parts, client = Parts(), worker.updated.client
            parts.time(worker.updated, "take", "engine")
            parts.time(client, "update", "load")
            parts.time(client, "finish", "load")
            parts.time(client, "held", "compare")
            parts.time(client, "generate", "probe")
            parts.time(executor._host.workers["policy"].module, "token_logprobs", "trainer's scores")
            whole = [seconds(lambda: policy.sync_weights(engine, through=through)) for _ in range(options.updates)]
            nbytes = policy.last_sync.nbytes if policy.last_sync else 0
            source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
            target.copy_(source)
            copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(5))
            drawing = seconds(
                lambda: completions(client, options.rows, options.prompt, options.tokens, options.vocabulary)
            )
            scored, trained = learn(model, options.rows, length, options.vocabulary)
        finally:
            worker.updated.client.close()
    names = ("engine", "load", "compare", "probe", "trainer's scores")
    each = {name: parts.each(name, options.updates) for name in names}
    update, step = statistics.median(whole), drawing + scored + trained
    return {
        "precision": precision,
        "bytes": nbytes,
        "update": update,
        "arrival": update - each["engine"] - each["trainer's scores"],
        "load": each["load"],
        "compare": each["compare"],
        "probe": each["probe"] + each["trainer's scores"],
        "one copy": copy,
        "step": step,
        "completions": drawing,
        "scores": scored,
        "forward and backward": trained,
        "share": update / (update + step),
    }


def markdown(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table of the results."""
    lines = [
        "# A proved weight update of vLLM",
        "",
        f"`experiments/benchmarks/vllm_update.py`, {datetime.date.today().isoformat()}, {platform.machine()}, "
        f"{options.threads} threads, vLLM {engine_version()}, torch {version('torch')}. Shapes of SmolLM2-135M, "
        f"{options.layers} layers. A step: {options.rows} rows of {options.prompt} + {options.tokens} tokens.",
        "",
        "| engine | MB | update, s | arrival | load | compare | probe | one copy, s | step, s | share of a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [f"{row[name]:.2f}" for name in ("update", "arrival", "load", "compare", "probe", "one copy")]
        cells = [row["precision"], f"{row['bytes'] / 1e6:.0f}", *numbers, f"{row['step']:.1f}", f"{row['share']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def engine_version() -> str:
    """Of the package that is installed."""
    import vllm

    return str(vllm.__version__)


def main() -> None:
    """Measure each precision and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.rows % 8:
        parser.error(f"--rows must be a multiple of 8, got {options.rows}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    rows = [measure(precision, options) for precision in options.precisions]
    options.output.mkdir(parents=True, exist_ok=True)
    arguments = {name: value for name, value in vars(options).items() if name != "output"}
    write_json(options.output / "summary.json", {"options": arguments, "rows": rows})
    table = markdown(rows, options)
    (options.output / "table.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
