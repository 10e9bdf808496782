"""docs/objectives.md: one section a recipe, from its docstring and its components; a test compares.

python -m docs.scripts.objectives    # writes the page
"""

import inspect
from pathlib import Path

from docs.scripts.reference import ARXIV, paragraphs
from rl_fn import components, recipes

PAGE = Path(__file__).parents[1] / "objectives.md"

HEAD = """# Objectives

`rl_fn.recipes.NAME()` is an algorithm with its paper's constants: an `Objective`. `explain()` prints the equation with
the constants in it. The reference on the site (`make docs`) has the arguments; `python -m docs.scripts.objectives`
writes this page from the docstrings.

Each picture on the site is drawn by the recipe itself: one completion of one token, advantage +1 or −1, π_old = 0.25.
The gradient is that of log π: at ratio 1 it is −A nearly everywhere. Where a factor is held constant (sg), the loss
drawn is not the integral of the gradient. What depends on other tokens (Clip-Cov, KL-Cov, M2PO) is drawn for this one
token.

<!-- overview -->

"""

TAIL = """## Components

`objective.replace(...)` puts another component in place. What cannot work is refused when the objective is made, with
the reason and the remedy; what only a batch can tell, at the call.

| field | components |
|---|---|
| `advantage` | {advantage}, any function of rewards `*batch G` |
| `loss` | {loss}, any function of a `Batch` |
| `correction` | {correction}, any function of a `Batch` |
| `aggregation` | `Aggregation(mode, max_completion_length)` |
| `kl`, `reward_kl` | `KL(estimator, coef)`: in the loss, or taken off the rewards |
| `entropy` | `EntropyBonus(coef)` |
| `value` | `ValueLoss(clip)`: the critic's, by `objective.value_parts(batch)` |
| `dynamic_sampling` | `DynamicSampling(low, high)`: groups without a signal are not trained on, nor counted |

What every recipe could have is set by `replace`:
`rl_fn.recipes.dapo().replace(kl=KL("k3", 0.04), correction=TIS(2.0), entropy=EntropyBonus(0.01))`.
`Product((a, b))` has both a weight and a mask. A plain function is taken with the defaults that lose nothing: it may
have a gradient where the advantage is 0, its statistics may be of the whole batch, and packed rows are refused;
`Custom(function, over_batch=False, ...)` says what is known of it.

| refused | because | remedy |
|---|---|---|
| a loss that weighs by π/μ, and TIS or IcePop | the ratio is counted twice | no correction, `behaviour="old"` |
| a sequence's loss, and a mean over tokens | completions weigh by their length | `seq-mean-token-mean`, `GSPOToken` |
| a sequence's loss, and an advantage per token | it is spread over the completion | `GSPOToken` |
| a KL in the reward and in the loss | penalised twice | keep one |
| a critic's loss without an advantage from a critic | nothing uses the critic | `value=None`, `GAE` |
| `seq-mean-token-sum-norm` without a max_completion_length | nothing to divide by | the generation budget |

Micro-batches add up exactly to the batch, except for losses whose choice of tokens depends on the batch passed in
(Clip-Cov, KL-Cov, M2PO, high-entropy masks): `objective.over_batch` says so.
"""


def section(name: str) -> str:
    """One recipe: what it is, its equation, what it reads, its paper."""
    recipe = getattr(recipes, name)
    parts = paragraphs(recipe)
    paper = next(p for p in parts if p.startswith("Reference:"))
    paper = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(paper.removeprefix("Reference:").split()))
    objective = recipe()
    reads = [f"`{field}`" for field in objective.required_rollout_fields]
    batch = [f"`{field}`" for field in objective.required_batch_fields]
    constants = [f"`{p.name}={p.default!r}`" for p in inspect.signature(recipe).parameters.values()]
    beyond = f"of a batch beyond its first four fields: {', '.join(batch) or 'nothing'}"
    told = f"- Constants: {', '.join(constants)}.\n" if constants else ""
    lines = [
        f"## {name}",
        " ".join(parts[0].split()),
        f"```equation\n{parts[1]}\n```",
        f"- Reads of rollouts: {', '.join(reads)}; {beyond}.\n{told}- {paper}",
    ]
    return "\n\n".join(lines) + "\n"


def _of(module: str) -> list[str]:
    """Names of the components in the files whose names hold a word."""
    owners = {name: getattr(components, name).__module__.split(".")[-1] for name in components.__all__}
    return [name for name, owner in owners.items() if module in owner and not name.startswith(("Advantage", "Custom"))]


def page() -> str:
    """The whole page."""
    named = {"advantage": _of("advantage"), "loss": _of("loss_components"), "correction": _of("corrections")}
    tail = TAIL.format(**{slot: ", ".join(f"`{name}`" for name in names) for slot, names in named.items()})
    return HEAD + "\n".join(section(name) for name in recipes.__all__) + "\n" + tail


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
