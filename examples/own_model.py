"""A model of your own, a class of PyTorch, in the loop of grpo.py; it learns to write ones."""

from pathlib import Path

import torch
import tyro
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import rl_fn
from rl_bridge import AdamW, Policy, Rollout, Run, SamplingParams, init, load_model, load_rows


class Tiny(nn.Module):
    max_positions = 512

    def __init__(self, vocabulary: int = 15, width: int = 64, layers: int = 2, heads: int = 4):
        super().__init__()
        self.heads, self.norm, self.head = heads, nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(self.max_positions, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, input_ids, position_ids, attention_mask=None) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv(x).chunk(3, -1))
            y = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
            x = x + y.transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return self.head(self.norm(x))


def main(tokenizer: str, data: str, weights: Path | None = None, output: Path = Path("runs"), steps: int = 50) -> None:
    init()
    model, rows = load_model(Tiny, tokenizer=tokenizer, weights=weights), load_rows(data)
    objective = rl_fn.recipes.grpo().replace(kl=None)
    rollout, policy = Rollout(model), Policy(model, objective, AdamW(1e-3))
    with Run("own_model", state=[policy, rows], output=output) as run:
        for step in run.steps(steps):
            policy.sync_weights(rollout)
            groups = rollout.generate(rows.take(8), SamplingParams(n=8, max_new_tokens=8, seed=step))
            groups = groups.score(lambda completion, row: completion.count("1"))
            run.log(policy.update(groups.batch().with_advantages(objective)), groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
