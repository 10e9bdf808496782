"""docs/objectives.md from the recipes' own docstrings and pieces: `python -m rl_fn.objectives.recipes.table`."""

import inspect
from pathlib import Path

from rl_fn import components, recipes

_HEAD = """# Objectives

One row a recipe, from its docstring and its pieces (`python -m
rl_fn.objectives.recipes.table` writes this page; a test compares).
`rl_fn.NAME()` has the constants of the paper where it gives them; each docstring says where it does not.
`rl_fn.NAME().explain()` prints the equation with its constants. A recipe ends in `_objective` where its short name is
the loss function's.

"Rollouts" are what the advantages read, beyond the mask: `objective.advantages(rewards, mask)`, or `advantages_of` for
what has more than rewards, or `token_advantages(token_rewards, values, mask)` with a critic. "Batch" is what the loss
reads beyond `logprobs, old_logprobs, advantages, mask`; a KL term adds `ref_logprobs`, an entropy term `entropies`, a
correction `rollout_logprobs`.

| recipe | equation, to be minimised | rollouts | batch | paper |
|---|---|---|---|---|
"""

_TAIL = """
## Pieces

`objective._replace(...)` puts another piece in place. What cannot work is refused when the objective is made, with the
reason and the remedy; what only a batch can tell, at the call.

| slot | pieces |
|---|---|
| `advantage` | {advantage}, any function of rewards `*batch G` |
| `loss` | {loss}, any function of a `Batch` |
| `correction` | {correction}, any function of a `Batch` |
| `aggregation` | `Aggregation(mode, max_completion_length)` |
| `kl`, `reward_kl` | `KL(estimator, coef)`: in the loss, or taken off the rewards |
| `entropy` | `Entropy(coef)` |
| `value` | `ValueLoss(clip)`: the critic's, by `objective.value_parts(batch)` |

TIS is `TruncatedImportance(cap)`, IcePop and MIS are `MaskedImportance(low, high, level)`; `Product((a, b))` has both a
weight and a mask.

| refused | because | remedy |
|---|---|---|
| a loss that weighs by π/μ, and TIS or IcePop | the ratio is counted twice | no correction, `behaviour="old"` |
| a sequence's loss, and a mean over tokens | answers weigh by their length | `seq-mean-token-mean`, `GSPOToken` |
| a sequence's loss, and an advantage per token | it is spread over the answer | `GSPOToken` |
| a KL in the reward and in the loss | penalised twice | keep one |
| a critic's loss without an advantage from a critic | nothing uses the critic | `value=None`, `GAE` |
| `seq-mean-token-sum-norm` without a max_completion_length | nothing to divide by | the generation budget |

Micro-batches add up exactly to the batch, except for ClipCov, KLCov, SecondMoment and HighEntropy, whose choice of
tokens depends on the batch passed in. At ratio 1 the gradient is REINFORCE's with the same advantages, except for
luspo (an answer weighs by its length), clip_cov (tokens are dropped) and vapo (a language-model loss is added).
"""


def _paragraphs(name: str) -> list[str]:
    doc = inspect.getdoc(getattr(recipes, name)) or ""
    return [" ".join(paragraph.split()) for paragraph in doc.split("\n\n")]


def row(name: str) -> str:
    """Return the recipe's row: its equation is the docstring's second paragraph, its paper the Reference."""
    paragraphs = _paragraphs(name)
    paper = next(p for p in paragraphs if p.startswith("Reference:")).removeprefix("Reference: ").removesuffix(".")
    objective = getattr(recipes, name)()
    shape = getattr(objective.advantage, "shape", "*batch G")
    inputs = [f"{x} `{shape}`" if x == "rewards" else x for x in objective.inputs()]
    cells = [f"`{name}`", paragraphs[1], ", ".join(inputs), ", ".join(objective.needs()) or "–", paper]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _classes(*modules: str) -> str:
    owners = {f"rl_fn.components.{module}" for module in modules}
    names = [name for name in components.__all__ if getattr(components, name).__module__ in owners]
    return ", ".join(f"`{name}`" for name in names if not inspect.isabstract(getattr(components, name)))


def page() -> str:
    """Return the whole page."""
    tail = _TAIL.format(
        advantage=_classes("group_estimators", "estimators"),
        loss=_classes("token_losses", "sequence_losses"),
        correction=_classes("weights"),
    )
    return _HEAD + "\n".join(row(name) for name in recipes.__all__) + "\n" + tail


if __name__ == "__main__":
    Path("docs/objectives.md").write_text(page(), encoding="utf-8")
