"""Modules of a user's own: the classes of docs/engines.md word for word, and models as RLite's users write them."""

import ast
import re
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_bridge.engines import ParallelModule, returns

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S))


def _definitions():
    """The page's imports, classes, and what these need: no engine is made."""
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef)
    needed = {"tokenizer", "source"}
    body = [
        node
        for node in ast.parse(CODE).body
        if isinstance(node, kept) or (isinstance(node, ast.Assign) and {ast.unparse(t) for t in node.targets} <= needed)
    ]
    return ast.Module(body, [])


exec(compile(_definitions(), str(PAGE), "exec"), globals())
Policy, Line = globals()["Policy"], globals()["Line"]
WIDTH = 12


def tiny():
    return Qwen2Config(
        vocab_size=14,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


class Steps:
    """What a user of RLite writes below the class line."""

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    @returns("sum")
    def train_step(self, tokens, denominator):
        logits = self(tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        (loss / denominator).backward()
        return float(loss.detach()) / denominator

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class MyQwen(Steps, ParallelModule, Qwen2ForCausalLM):
    """With a say in its lifecycle."""

    def load_weights(self):
        """None are stored: what the factory makes stays."""


class PlainQwen(Steps, Qwen2ForCausalLM):
    """A model of transformers with methods, and nothing of ours."""


class QwenFirst(Steps, Qwen2ForCausalLM, ParallelModule):
    """In the other order."""


FACTORIES = {
    "Policy": Policy,
    "MyQwen": lambda: MyQwen(tiny()),
    "PlainQwen": lambda: PlainQwen(tiny()),
    "QwenFirst": lambda: QwenFirst(tiny()),
}


def tokens(rows=4):
    return torch.randint(2, 14, (rows, WIDTH), generator=torch.Generator().manual_seed(rows))
