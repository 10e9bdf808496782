"""Bias and noise of the field's gradient estimators, exact: every sequence of a small language is enumerated.

python experiments/estimators.py    # writes docs/estimators.md and experiments/results/estimators/
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import rl_fn
from experiments import enumeration
from experiments.enumeration import Compared, Language, compare, grouped, language, logits, logprobs, single
from rl_bridge.atomic import replacing, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "estimators"
VOCABULARY, LENGTH, GROUP = 3, 3, 4

Table = dict[str, Compared]
Loss = Callable[[jax.Array], jax.Array]


class Setting(NamedTuple):
    """A language, the policy π, another one (π_ref or μ), and a reward of 0 or 1 for each sequence."""

    lang: Language
    policy: jax.Array
    other: jax.Array
    rewards: jax.Array


def setting(
    vocabulary: int = VOCABULARY, length: int = LENGTH, seed: int = 0, distance: float = 0.5, right: float = 0.5
) -> Setting:
    """Random logits; `distance` between the policies; about the share `right` of the sequences is."""
    lang = language(vocabulary, length)
    policy = logits(lang, vocabulary, seed)
    rewards = np.random.default_rng(seed + 2).random(len(lang.tokens)) < right
    return Setting(lang, policy, policy + logits(lang, vocabulary, seed + 1, distance), jnp.asarray(rewards * 1.0))


def kl_estimators(s: Setting) -> dict[str, Loss]:
    """Per-token estimators of KL(π‖π_ref) as functions of π's log-probabilities."""
    ref, mask = logprobs(s.lang, s.other), jnp.asarray(s.lang.mask)

    def estimator(name: str) -> Loss:
        piece = rl_fn.KL(name, 1.0)

        def estimate(x: jax.Array) -> jax.Array:
            old = jax.lax.stop_gradient(x)
            return piece.estimate(rl_fn.Batch(x, old, old, mask, ref_logprobs=ref))

        return estimate

    return {name: estimator(name) for name in ("k1", "k2", "k3", "abs", "k1+", "k3+")}


def kl_as_loss(s: Setting) -> dict[str, tuple[Compared, Compared]]:
    """An estimator differentiated on rollouts of π: against ∇KL(π‖π_ref) and ∇KL(π_ref‖π) at the visited prefixes."""
    reverse = jax.grad(lambda x: enumeration.token_kl(s.lang, s.policy, x, s.other))(s.policy).ravel()
    forward = jax.grad(lambda x: enumeration.token_kl(s.lang, s.policy, s.other, x))(s.policy).ravel()
    rows = {}
    for name, estimate in kl_estimators(s).items():
        sampled = single(s.lang, s.policy, s.policy, lambda x, e=estimate: e(x).sum(-1))
        rows[name] = (compare(sampled, reverse), compare(sampled, forward))
    return rows


def kl_as_reward(s: Setting) -> Table:
    """REINFORCE with the estimators' sum as a cost, against the gradient of the KL between whole sequences."""
    truth = jax.grad(lambda x: enumeration.sequence_kl(s.lang, x, s.other))(s.policy).ravel()
    rows = {}
    for name in ("k1", "k2", "k3", "abs"):
        cost = kl_estimators(s)[name](logprobs(s.lang, s.policy)).sum(-1)
        rows[f"{name} as reward"] = compare(
            single(
                s.lang,
                s.policy,
                s.policy,
                lambda x, c=cost: rl_fn.reinforce(x, jnp.broadcast_to(-c[:, None], x.shape)).sum(-1),
            ),
            truth,
        )
    for name in ("k2", "k3"):
        estimate = kl_estimators(s)[name]
        sampled = single(s.lang, s.policy, s.policy, lambda x, e=estimate: e(x).sum(-1))
        rows[f"{name} as loss"] = compare(sampled, truth)
    return rows


def objectives() -> dict[str, rl_fn.Objective]:
    """What differs between the group methods, one thing at a time."""
    plain = rl_fn.reinforce_objective()
    centred = rl_fn.GroupNormalised(scale="none")
    per_answer = rl_fn.Aggregation("seq-mean-token-mean")
    return {
        "REINFORCE, no baseline": plain,
        "RLOO": plain._replace(advantage=rl_fn.LeaveOneOut()),
        "r − mean": plain._replace(advantage=centred),
        "(r − mean)/std": plain._replace(advantage=rl_fn.GroupNormalised()),
        "r − mean, per-answer token mean": plain._replace(advantage=centred, aggregation=per_answer),
        "r − mean, token mean (DAPO's)": plain._replace(advantage=centred, aggregation=rl_fn.Aggregation("token-mean")),
        "GRPO (std, per-answer token mean)": rl_fn.grpo(kl_coef=0.0),
        "Dr. GRPO (÷ horizon)": rl_fn.dr_grpo(horizon=LENGTH),
    }


def group_methods(prompts: Sequence[Setting], group: int = GROUP) -> Table:
    """On-policy groups, one a prompt, against the gradient of the mean of the prompts' expected rewards."""
    truths = [enumeration.true_gradient(s.lang, s.policy, s.rewards) for s in prompts]
    return {
        name: compare(
            [grouped(s.lang, s.policy, objective, s.rewards, group) for s in prompts],
            jnp.concatenate(truths) / len(truths),
        )
        for name, objective in objectives().items()
    }


def corrections(cap: float = 2.0) -> dict[str, rl_fn.TruncatedImportance | rl_fn.MaskedImportance | None]:
    """Weights of π/μ; a cap nothing reaches is no truncation."""
    none = 1e30
    return {
        "none": None,
        "token, untruncated": rl_fn.TruncatedImportance(none, "token"),
        f"token, min(·, {cap:g})": rl_fn.TruncatedImportance(cap, "token"),
        f"token, 0 outside [{1 / cap:.2g}, {cap:g}]": rl_fn.MaskedImportance(1 / cap, cap, "token"),
        "geometric mean of the sequence": rl_fn.TruncatedImportance(none, "sequence"),
        "sequence, untruncated": rl_fn.TruncatedImportance(none, "sequence_sum"),
        f"sequence, min(·, {cap:g})": rl_fn.TruncatedImportance(cap, "sequence_sum"),
        f"sequence, 0 outside [{1 / cap:.2g}, {cap:g}]": rl_fn.MaskedImportance(1 / cap, cap, "sequence_sum"),
    }


def off_policy(s: Setting, group: int = GROUP) -> Table:
    """RLOO on groups from μ ≠ π: what a correction costs in bias, and what it gains in noise."""
    truth = enumeration.true_gradient(s.lang, s.policy, s.rewards)
    base = rl_fn.reinforce_objective()._replace(advantage=rl_fn.LeaveOneOut())
    rows = {}
    for name, correction in corrections().items():
        objective = dataclasses.replace(base, correction=correction)
        rows[name] = compare(grouped(s.lang, s.policy, objective, s.rewards, group, sampler=s.other), truth)
    return rows


def markdown(rows: Table) -> list[str]:
    """A table."""
    lines = ["| estimator | cosine | scale | error | noise |", "|---|---|---|---|---|"]
    return lines + [
        f"| {name} | {c.cosine:.4f} | {c.scale:.4f} | {c.error:.4f} | {c.deviation:.2f} |" for name, c in rows.items()
    ]


def page(loss: dict[str, tuple[Compared, Compared]], others: dict[str, Table]) -> str:
    """docs/estimators.md."""
    lines = [
        "# What the estimators estimate",
        "",
        "Generated by `python experiments/estimators.py`; tests/experiments/test_estimators.py proves it.",
        f"All sequences of a language of {VOCABULARY} tokens (one ends the sequence) and at most {LENGTH} steps are",
        "enumerated in float64: the numbers are exact expectations. Against the true gradient g*: *cosine* of the",
        "angle, *scale* ⟨g, g*⟩/⟨g*, g*⟩, *error* ‖g − g*‖/‖g*‖, and *noise*, the standard deviation of one draw",
        "in units of ‖g*‖.",
        "",
        "## KL estimators as a loss",
        "",
        "Differentiated on rollouts of π; the truth is the gradient of the exact KL at the prefixes that π visits.",
        "k1's gradient is pure noise. k2's is that of KL(π‖π_ref), k3's that of the *other* direction, KL(π_ref‖π).",
        "",
        "| estimator | error against ∇KL(π‖π_ref) | error against ∇KL(π_ref‖π) | noise |",
        "|---|---|---|---|",
    ]
    lines += [f"| {n} | {r.error:.4f} | {f.error:.4f} | {r.deviation:.2f} |" for n, (r, f) in loss.items()]
    for title, rows in others.items():
        lines += ["", *title.split("\n"), "", *markdown(rows)]
    return "\n".join(lines) + "\n"


TITLES = {
    "kl_as_reward": """## KL estimators as a cost in the reward

Against the gradient of the KL between whole sequences. Only k1 is unbiased. A per-token loss misses how a token changes
the prefixes that come after it: k2 as a loss is exact for each token and still biased for the sequence.""",
    "group_methods": f"""## Advantages and aggregation, groups of {GROUP}

Two prompts of different difficulty, rewards of 0 and 1. RLOO is unbiased; r − mean is RLOO times (G − 1)/G, the same
direction. The std turns no prompt's own gradient as long as rewards are 0 or 1, but weights prompts against each other;
dividing by an answer's length turns the gradient itself: it is that of another objective.""",
    "off_policy": """## Rollouts from another distribution than the trainer's

RLOO with weights π/μ. Only the whole sequence's untruncated weight is unbiased; truncation and masking trade bias for
noise. Truncating the sequence's weight costs the least bias here; masking it, the most.""",
}


def figure(rows: Table) -> Figure:
    """Bias against noise of the off-policy corrections."""
    fig = Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.subplots()
    for name, c in rows.items():
        axes.scatter(c.deviation, c.error)
        axes.annotate(name, (c.deviation, c.error), textcoords="offset points", xytext=(5, 3), fontsize=8)
    axes.set(xlabel="noise of one group / ‖g*‖", ylabel="bias ‖g − g*‖ / ‖g*‖", title="Off-policy corrections, exact")
    return fig


def main() -> None:
    """Compute, write, print."""
    with jax.enable_x64(True):
        s = setting()
        loss = kl_as_loss(s)
        tables = {
            "kl_as_reward": kl_as_reward(s),
            "group_methods": group_methods([s, setting(seed=10, right=0.15)]),
            "off_policy": off_policy(setting(distance=1.0)),
        }
    text = page(loss, {TITLES[name]: rows for name, rows in tables.items()})
    with replacing(ROOT / "docs" / "estimators.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    with replacing(RESULTS / "off_policy.png") as temporary:
        figure(tables["off_policy"]).savefig(temporary, format="png", dpi=120)
    rows = {name: {n: c._asdict() for n, c in table.items()} for name, table in tables.items()}
    rows["kl_as_loss"] = {n: {"reverse": r._asdict(), "forward": f._asdict()} for n, (r, f) in loss.items()}
    write_json(RESULTS / "result.json", {"vocabulary": VOCABULARY, "length": LENGTH, "group": GROUP, **rows})
    print(text)


if __name__ == "__main__":
    main()
