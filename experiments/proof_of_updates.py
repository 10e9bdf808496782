"""What the proof of a weight update sees: lost and wrong updates of an engine of vLLM, and right ones that are refused.

.venv-vllm/bin/python experiments/proof_of_updates.py faults                  # the table, a minute a precision
.venv-vllm/bin/python experiments/proof_of_updates.py right --updates 1000    # right updates of each precision

Writes experiments/results/proof_of_updates/{faults,right}.json and table.md. A fault is what reached the engine beside
what was sent; it is looked for by the samples alone (8 tokens, the tolerance of the precision), and by comparing what
the engine holds. The models are tiny: two layers of 64, weights of standard deviation 0.12 (int8: 0.06).
"""

# pyright: reportMissingImports=false

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.engines.dispatch import returns
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.rollout.vllm.client import EngineClient, open_in_process
from rl_bridge.rollout.vllm.weight_probe import Drawn, Probe, ProbeFailed, Tolerance, check_scored
from rl_bridge.rollout.vllm.weight_updates import Attempt, TakesProvedWeights, UpdatedEngine
from rl_bridge.weights.source import Precision, Through

RESULTS = Path(__file__).parent / "results" / "proof_of_updates"
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
SIZES: dict[str, int] = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS: dict[str, int] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
LAYER = "model.layers.1."
QUERY, KEY, VALUE = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
DOWN, UP, NORM, BIAS = (
    f"{LAYER}mlp.down_proj.weight",
    f"{LAYER}mlp.up_proj.weight",
    "model.norm.weight",
    f"{LAYER}self_attn.k_proj.bias",
)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ONE_OF_EACH = (EMBEDDINGS, QUERY, KEY, f"{LAYER}self_attn.o_proj.weight", UP, DOWN, NORM, BIAS)
Weights = dict[str, Tensor]


def model_of(*, tied: bool, deviation: float) -> Qwen2ForCausalLM:
    """Random weights, biases too."""
    torch.manual_seed(0)
    config: Any = Qwen2Config(**SIZES, **HEADS, eos_token_id=1, bos_token_id=0, tie_word_embeddings=tied)  # type: ignore[arg-type]
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=deviation)
    return model


def moved(old: Mapping[str, Tensor], size: float, only: str = "", *, relative: bool = False) -> Weights:
    """An update: each weight of the tensors whose names begin so moves by N(0, size), or N(0, size) of itself."""
    noise = torch.Generator().manual_seed(5)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in new.items():
        if name.startswith(only):
            step = size * torch.randn(tensor.shape, generator=noise)
            tensor += tensor * step if relative else step
    return new


class Fault(NamedTuple):
    """``pair`` gives what was sent, and what the engine got instead."""

    name: str
    pair: Callable[[Weights], tuple[Weights, Weights]]


def lost(size: float, only: str = "", *, relative: bool = False) -> Callable[[Weights], tuple[Weights, Weights]]:
    """The engine keeps what it had."""
    return lambda old: (moved(old, size, only, relative=relative), old)


def other(change: Callable[[Weights], Mapping[str, Tensor]]) -> Callable[[Weights], tuple[Weights, Weights]]:
    """The engine gets some tensors otherwise."""
    return lambda old: (old, {**old, **change(old)})


def _exchanged(name: str, first: slice, second: slice) -> Callable[[Weights], Weights]:
    def change(old: Weights) -> Weights:
        tensor = old[name].clone()
        tensor[first], tensor[second] = old[name][second], old[name][first]
        return {name: tensor}

    return change


def _head_row(old: Weights) -> Weights:
    name = HEAD if HEAD in old else EMBEDDINGS
    tensor = old[name].clone()
    tensor[5] = tensor[6]
    return {name: tensor}


def _half_old(old: Weights) -> tuple[Weights, Weights]:
    new = moved(old, 0.02)
    mixed = new[UP].clone()
    mixed[: len(mixed) // 2] = old[UP][: len(mixed) // 2]
    return new, {**new, UP: mixed}


def _old_norm(old: Weights) -> tuple[Weights, Weights]:
    new = moved(old, 0.02)
    return new, {**new, NORM: old[NORM]}


def _layers(old: Weights) -> Weights:
    swap = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    return {name: old[swap[name[:15]] + name[15:]] for name in old if name[:15] in swap}


FAULTS = (
    *(Fault(f"a whole update lost, N(0, {size:g})", lost(size)) for size in (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    *(Fault(f"one layer's update lost, N(0, {size:g})", lost(size, LAYER)) for size in (1e-4, 1e-3, 1e-2)),
    *(Fault(f"update of 1e-6 of itself lost: {name}", lost(1e-6, name, relative=True)) for name in ONE_OF_EACH),
    *(
        Fault(f"down_proj × (1 + {size:g})", other(lambda old, size=size: {DOWN: old[DOWN] * (1 + size)}))
        for size in (3e-4, 1e-3, 0.03, 0.3)
    ),
    Fault("head row 5 = row 6", other(_head_row)),
    Fault("two embedding rows exchanged", other(_exchanged(EMBEDDINGS, slice(56, 57), slice(58, 59)))),
    Fault("k_proj and v_proj exchanged", other(lambda old: {KEY: old[VALUE], VALUE: old[KEY]})),
    Fault(
        "half of q_proj and k_proj exchanged",
        other(lambda old: {KEY: old[QUERY][:32], QUERY: torch.cat([old[KEY], old[QUERY][32:]])}),
    ),
    Fault("two heads of q_proj exchanged", other(_exchanged(QUERY, slice(0, 32), slice(32, 64)))),
    Fault("layers 0 and 1 exchanged", other(_layers)),
    Fault("half an MLP of the version before", _half_old),
    Fault("final norm of the version before", _old_norm),
    Fault(
        "a norm with a weight 1 % off",
        other(lambda old: {NORM: old[NORM] * torch.cat([torch.tensor([1.01]), torch.ones(63)])}),
    ),
    Fault("k bias 0", other(lambda old: {BIAS: torch.zeros_like(old[BIAS])})),
)


class World(NamedTuple):
    """An engine, and the model whose weights it has."""

    precision: Precision
    client: EngineClient
    model: Qwen2ForCausalLM
    checkpoint: Path
    through: Through

    @property
    def weights(self) -> Weights:
        """Of the model; a tied head once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def folder(self, name: str, weights: Weights) -> Path:
        """These weights as they are sent: in the engine's precision."""
        folder = self.checkpoint.parent / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copyfile(self.checkpoint / "config.json", folder / "config.json")
        sent = dict(pair for item in weights.items() for pair in self.through(*item))
        save_file({name: tensor.contiguous() for name, tensor in sent.items()}, folder / "model.safetensors")
        return folder

    def load(self, folder: Path) -> None:
        """An update of the engine with the weights of a folder, without any proof."""
        from rl_bridge.rollout.vllm.weight_copies import header_of

        self.client.pause()
        self.client.start()
        self.client.update(folder, list(header_of(folder)))
        self.client.finish("1")
        assert self.client.reset_prefix_cache()
        self.client.resume()


@contextmanager
def world_of(precision: Precision, place: Path) -> Iterator[World]:
    """bfloat16 has a tied head, the others have one of their own. What int8 leaves high is float32."""
    model = model_of(tied=precision == "bf16", deviation=0.06 if precision == "int8" else 0.12)
    activations = "bfloat16" if precision == "bf16" else "float32"
    dtype = getattr(torch, activations)
    through = write_checkpoint(StateSource(model), place / "start", precision, dtype=dtype)
    options = VLLMOptions(
        precision=precision,
        dtype=activations,
        max_model_len=96,
        max_num_seqs=8,
        kv_cache_gib=0.02,
        arguments=("block_size=32",),
    )
    client = open_in_process(place / "start", options)
    try:
        yield World(precision, client, model, place / "start", through)
    finally:
        client.close()


def found_by(world: World, fault: Fault) -> tuple[bool | None, bool | None, float, Held]:
    """Whether samples find a fault, and the comparison; the samples' mean gap; what was compared.

    None: what was sent and what came are the same bytes in this precision, and there is nothing to find.
    """
    new, instead = fault.pair(world.weights)
    sent, came = world.folder("sent", new), world.folder("came", instead)
    if (sent / "model.safetensors").read_bytes() == (came / "model.safetensors").read_bytes():
        return None, None, 0.0, Held(0, {}, {})
    world.load(came)
    held = world.client.held(sent)
    probe = Probe.of(world.client.limits(), 1.0)
    drawn = world.client.generate(probe.prompt, count=probe.count, seed=probe.seed, temperature=1.0)
    expected = scores(world, new, drawn)
    gaps = [abs(a - b) for a, b in zip(drawn.logprobs, expected, strict=True)]
    try:
        check_scored(drawn, expected, Tolerance.of(world.precision))
        sampled = False
    except ProbeFailed:
        sampled = True
    return sampled, bool(held.different), sum(gaps) / len(gaps), held


@torch.no_grad()
def scores(world: World, weights: Weights, drawn: Drawn) -> list[float]:
    """The trainer's log-probabilities under these weights, in the arithmetic of the engine."""
    model = model_of(tied=world.precision == "bf16", deviation=0.1)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if world.precision == "bf16":
        model = model.bfloat16()
    logits = model(torch.tensor([drawn.sequence])).logits[0].float().log_softmax(-1)
    first = len(drawn.prompt) - 1
    return [float(logits[first + place, token]) for place, token in enumerate(drawn.tokens)]


class Policy(TokenScorer):
    """Moves its weights with each update."""

    updates = 0

    @returns("same")
    @torch.no_grad()
    def weights_version(self) -> int:
        return self.updates

    @returns("same")
    @torch.no_grad()
    def advance(self, size: float) -> None:
        """N(0, size) for each weight."""
        self.updates += 1
        noise = torch.Generator().manual_seed(self.updates)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=size)


class Rollout(TakesProvedWeights):
    """An engine whose gaps are written down."""

    def __init__(self, world: World) -> None:
        self.updated = UpdatedEngine(world.client, world.checkpoint, tolerance=Tolerance.of(world.precision))  # type: ignore[arg-type]
        self.gaps: list[list[float]] = []

    @returns("local")
    def prove_weights(self, scored: Mapping[tuple[int, ...], tuple[float, ...]]) -> Attempt:
        """As the worker's own."""
        drawn = self.updated._drawn
        if drawn is not None and len(drawn.tokens) == 8:
            pairs = zip(drawn.logprobs, scored[drawn.sequence], strict=True)
            self.gaps.append([abs(ours - theirs) for ours, theirs in pairs])
        return self.updated.prove(scored)


def right_updates(precision: Precision, count: int, size: float) -> dict[str, Any]:
    """Right updates in a row: how many were refused, and how many the precision's tolerance would have refused."""
    with tempfile.TemporaryDirectory() as name, world_of(precision, Path(name)) as world:
        executor = LocalExecutor("cpu")
        engine = InferenceEngine(partial(Rollout, world), executor=executor, name="rollout").build()
        worker = executor._host.workers["rollout"].module
        scoring = ScoringConfig(dtype="bfloat16" if precision == "bf16" else "float32")
        policy = TrainEngine(
            partial(Policy, StateSource(world.model), scoring), executor=executor, name="policy"
        ).build()
        refused, began = 0, time.perf_counter()
        for _ in range(count):
            policy.advance(size)
            policy.sync_weights(engine, through=world.through)
            assert policy.last_sync is not None
            refused += bool(policy.last_sync.replaced)
        seconds = time.perf_counter() - began
        fixed = Tolerance.of(precision)
        means = [sum(gaps) / len(gaps) for gaps in worker.gaps]
        before = sum(mean > fixed.mean or max(gaps) > fixed.most for mean, gaps in zip(means, worker.gaps, strict=True))
        return {
            "precision": precision,
            "updates": count,
            "size": size,
            "refused": refused,
            "refused by the precision's tolerance": before,
            "median gap": sorted(means)[len(means) // 2],
            "largest gap": max(means),
            "allowed": worker.updated._tolerance.mean,
            "seconds": round(seconds, 1),
        }


def faults(precision: Precision) -> list[dict[str, Any]]:
    """Each fault in one engine."""
    rows = []
    with tempfile.TemporaryDirectory() as name, world_of(precision, Path(name)) as world:
        world.load(world.folder("sent", world.weights))
        right = world.client.held(world.checkpoint)
        assert not right.different and not right.unread, right
        for fault in FAULTS:
            sampled, compared, gap, _ = found_by(world, fault)
            rows.append({"fault": fault.name, "samples": sampled, "compared": compared, "gap": gap})
            print(precision, rows[-1], flush=True)
    return rows


def markdown(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """A row a fault; in each precision what samples found, and what the comparison did."""
    names = {True: "found", False: "missed", None: "same bytes"}
    lines = ["| what reached the engine | " + " | ".join(f"{p}: samples | {p}: compared" for p in found) + " |"]
    lines.append("|---" * (1 + 2 * len(found)) + "|")
    for rows in zip(*found.values(), strict=True):
        cells = [f"{names[row['samples']]} | {names[row['compared']]}" for row in rows]
        lines.append(f"| {rows[0]['fault']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write after each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "right"])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--size", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for precision in options.precisions:
        if options.what == "faults":
            found[precision] = faults(precision)
            with replacing(options.output / "table.md") as temporary:
                temporary.write_text(markdown(found), encoding="utf-8")
        else:
            found[precision] = right_updates(precision, options.updates, options.size)
            print(found[precision], flush=True)
        write_json(options.output / f"{options.what}.json", {"machine": facts(), "rows": found})


if __name__ == "__main__":
    main()
