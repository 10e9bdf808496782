"""Models and data of the whole-step benchmark, in a folder that both sides read.

python experiments/benchmarks/whole_step_models.py FOLDER tiny smollm2
"""

import argparse
import random
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.common.files import write_json
from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import Mesh, NeedParallel
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.models.pretrained import new_for_rows, save_pretrained
from rl_bridge.models.small import load_smollm2
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines

ROWS, BATCH = 20_000, 256


def tiny(folder: Path, updates: int) -> None:
    """A new Qwen2 of 1 M parameters, after some supervision: it adds two numbers of two digits, often wrongly."""
    rows = arithmetic_rows(["+"])
    random.Random(0).shuffle(rows)
    source, tokenizer = new_for_rows(rows, seed=0)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(pad, int) and isinstance(eos, int)
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup=20)
    with Engines(rl_bridge.init("local"), Mesh(), source, ParallelConfig(), run="models") as engines:
        supervised = engines.supervised(optimizer, updates=updates, scoring=ScoringConfig())
        for _ in range(updates):
            chosen = random.Random(_).sample(rows, BATCH)
            answers = [(r, [*encode_prompt(tokenizer, r["answer"]), eos]) for r in chosen]
            batch = collate([single_turn(encode_prompt(tokenizer, r["prompt"]), a) for r, a in answers], pad)
            supervised.train_step(NeedParallel(batch), float(batch.mask.sum()))
            supervised.optimizer_step()
        save_pretrained(folder / "tiny", supervised, tokenizer)
    write_json(folder / "tiny.json", [{name: row[name] for name in ("prompt", "answer")} for row in rows[:ROWS]])


def smollm2(folder: Path, _: int) -> None:
    """SmolLM2-135M-Instruct, with sums to explain: a prompt has about 40 tokens, an explanation more than 32."""
    model, tokenizer = load_smollm2()
    model.save_pretrained(folder / "smollm2")
    tokenizer.save_pretrained(folder / "smollm2")
    numbers = random.Random(0)
    rows = []
    for _ in range(512):
        a, b = numbers.randrange(10, 100), numbers.randrange(10, 100)
        question = [
            {"role": "system", "content": "You are a calculator."},
            {"role": "user", "content": f"Explain step by step: what is {a} + {b}?"},
        ]
        rows.append({"prompt": question, "answer": str(a + b)})
    write_json(folder / "smollm2.json", rows)


def main() -> None:
    """Write the chosen models and their data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+", choices=["tiny", "smollm2"])
    parser.add_argument("--updates", type=int, default=150, help="of the tiny model's supervision")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        {"tiny": tiny, "smollm2": smollm2}[name](arguments.folder, arguments.updates)


if __name__ == "__main__":
    main()
