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

import rl_fn
from experiments import enumeration
from experiments.enumeration import Compared, Language, compare, grouped, language, logits, logprobs, single
from experiments.estimators_page import TITLES, Table, figure, page
from rl_bridge.common.files import replacing, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "estimators"
VOCABULARY, LENGTH, GROUP = 3, 3, 4

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
        piece = rl_fn.components.KL(name, 1.0)

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


def kl_off_policy(s: Setting, distance: float = 0.5) -> Table:
    """Estimators as a loss on rollouts of μ ≠ π: against ∇KL(π‖π_ref) at the prefixes that μ visits."""
    mask, ref = jnp.asarray(s.lang.mask), logprobs(s.lang, s.other)
    sampler = s.policy + logits(s.lang, s.policy.shape[-1], 7, distance)
    old = logprobs(s.lang, sampler)
    truth = jax.grad(lambda x: enumeration.token_kl(s.lang, sampler, x, s.other))(s.policy).ravel()

    def weighted(x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(jnp.exp(x - old)) * rl_fn.kl_k2(x, ref, mask)

    losses: dict[str, Loss] = {
        "k2": lambda x: rl_fn.kl_k2(x, ref, mask),
        "k3": lambda x: rl_fn.kl_k3(x, ref, mask),
        "k2, weighted by sg(π/μ)": weighted,
        "importance-corrected k3": lambda x: rl_fn.kl_importance_corrected(x, old, ref, mask),
        "importance-corrected k3, log_clip 0.5": lambda x: rl_fn.kl_importance_corrected(
            x, old, ref, mask, log_clip=0.5
        ),
    }
    return {
        name: compare(single(s.lang, s.policy, sampler, lambda x, f=loss: f(x).sum(-1)), truth)
        for name, loss in losses.items()
    }


def _with_advantages(s: Setting, sampler: jax.Array, advantages: dict[str, jax.Array]) -> Table:
    truth = enumeration.true_gradient(s.lang, s.policy, s.rewards)
    mask = jnp.asarray(s.lang.mask)
    return {
        name: compare(single(s.lang, s.policy, sampler, lambda x, a=a: rl_fn.reinforce(x, a, mask).sum(-1)), truth)
        for name, a in advantages.items()
    }


def critic(s: Setting, wrong: float = 0.3) -> jax.Array:
    """V of π at every position, `S T`, off by a fixed random error a prefix."""
    values = enumeration.true_values(s.lang, s.policy, s.rewards)
    errors = jnp.asarray(wrong * np.random.default_rng(3).normal(size=s.lang.prefixes))
    return jnp.where(s.lang.mask, values + errors[s.lang.rows], 0.0)


def critic_on_policy(s: Setting, wrong: float = 0.3) -> Table:
    """REINFORCE with advantages from a critic, rollouts of π."""
    mask, rewards, values = jnp.asarray(s.lang.mask), enumeration.at_the_end(s.lang, s.rewards), critic(s, wrong)
    rows = {f"n-step, n = {n}": rl_fn.n_step(rewards, values, mask, n=n) for n in (1, 2)}
    rows |= {f"GAE, λ = {lam:g}": rl_fn.gae(rewards, values, mask, lam=lam) for lam in (0.0, 0.5, 0.95)}
    rows["Monte Carlo (n = T, or λ = 1)"] = rl_fn.gae(rewards, values, mask, lam=1.0)
    return _with_advantages(s, s.policy, {name: a.advantages for name, a in rows.items()})


def critic_off_policy(s: Setting, wrong: float = 0.3) -> Table:
    """The same on rollouts of μ ≠ π."""
    mask, rewards, values = jnp.asarray(s.lang.mask), enumeration.at_the_end(s.lang, s.rewards), critic(s, wrong)
    ratios = rl_fn.log_ratio(logprobs(s.lang, s.policy), logprobs(s.lang, s.other), mask)
    none = 1e30
    untruncated = rl_fn.vtrace(rewards, values, ratios, mask, rho_clip=none, c_clip=none)
    before = jnp.exp(jnp.cumsum(ratios, -1) - ratios)  # Π π/μ of the prefix
    rows = {
        "Monte Carlo, uncorrected": rl_fn.gae(rewards, values, mask, lam=1.0).advantages,
        "GAE, λ = 0.5, uncorrected": rl_fn.gae(rewards, values, mask, lam=0.5).advantages,
        "clipped importance": rl_fn.clipped_importance_advantages(rewards, values, ratios, mask).advantages,
        "Retrace": rl_fn.retrace(rewards, values, ratios, mask).advantages,
        "V-trace, ρ̄ = c̄ = 1": rl_fn.vtrace(rewards, values, ratios, mask).advantages,
        "V-trace, ρ̄ = c̄ = 2": rl_fn.vtrace(rewards, values, ratios, mask, rho_clip=2.0, c_clip=2.0).advantages,
        "V-trace, untruncated": untruncated.advantages,
        "V-trace, untruncated, × the prefix's π/μ": before * untruncated.advantages,
    }
    return _with_advantages(s, s.other, rows)


def objectives() -> dict[str, rl_fn.Objective]:
    """What differs between the group methods, one thing at a time."""
    plain = rl_fn.recipes.reinforce()
    centred = rl_fn.components.GRPOAdvantage(scale="none")
    per_completion = rl_fn.components.Aggregation("seq-mean-token-mean")
    return {
        "REINFORCE, no baseline": plain,
        "RLOO": plain.replace(advantage=rl_fn.components.RLOOAdvantage()),
        "r − mean": plain.replace(advantage=centred),
        "(r − mean)/std": plain.replace(advantage=rl_fn.components.GRPOAdvantage()),
        "r − mean, per-completion token mean": plain.replace(advantage=centred, aggregation=per_completion),
        "r − mean, token mean (DAPO's)": plain.replace(
            advantage=centred, aggregation=rl_fn.components.Aggregation("token-mean")
        ),
        "GRPO (std, per-completion token mean)": rl_fn.recipes.grpo(kl_coef=0.0),
        "Dr. GRPO (÷ horizon)": rl_fn.recipes.dr_grpo(max_completion_length=LENGTH),
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


Correction = Callable[[rl_fn.Batch], jax.Array]


def kept_where(mask_of: Callable[[rl_fn.Batch, jax.Array], jax.Array]) -> Correction:
    """A correction that drops tokens and weights none; `mask_of(batch, log π/μ)`."""

    def weights(batch: rl_fn.Batch) -> jax.Array:
        assert batch.rollout_logprobs is not None
        ratios = jax.lax.stop_gradient(rl_fn.log_ratio(batch.logprobs, batch.rollout_logprobs, batch.mask))
        return mask_of(batch, ratios).astype(ratios.dtype)

    return weights


def masks() -> dict[str, Correction]:
    """Rejection: what drifted too far does not count, the rest counts as it is."""
    return {
        "token rejected, k3 > 0.2": kept_where(lambda b, d: rl_fn.rejection_mask(d, b.mask, threshold=0.2)),
        "sequence rejected, mean k3 > 0.2": kept_where(
            lambda b, d: rl_fn.rejection_mask(d, b.mask, threshold=0.2, level="seq_mean")
        ),
        "second moment of the group ≤ 0.2 (M2PO)": kept_where(
            lambda b, d: rl_fn.second_moment_mask(d, b.mask, threshold=0.2)
        ),
        "bad sequences masked, mean log μ/π > 0.2": kept_where(
            lambda b, d: rl_fn.off_policy_sequence_mask(b.advantages, b.logprobs, b.logprobs - d, b.mask, threshold=0.2)
        ),
        "outward tokens masked, TV > 0.2 (VACO)": kept_where(
            lambda b, d: rl_fn.total_variation_mask(b.advantages, b.logprobs, b.logprobs - d, b.mask, threshold=0.2)
        ),
    }


def corrections(cap: float = 2.0) -> dict[str, Correction | None]:
    """Weights of π/μ; a cap nothing reaches is no truncation. Then masks."""
    none = 1e30
    return {
        "none": None,
        "token, untruncated": rl_fn.components.TIS(none, "token"),
        f"token, min(·, {cap:g})": rl_fn.components.TIS(cap, "token"),
        f"token, 0 outside [{1 / cap:.2g}, {cap:g}]": rl_fn.components.IcePop(1 / cap, cap, "token"),
        "geometric mean of the sequence": rl_fn.components.TIS(none, "sequence"),
        "sequence, untruncated": rl_fn.components.TIS(none, "sequence_sum"),
        f"sequence, min(·, {cap:g})": rl_fn.components.TIS(cap, "sequence_sum"),
        f"sequence, 0 outside [{1 / cap:.2g}, {cap:g}]": rl_fn.components.IcePop(1 / cap, cap, "sequence_sum"),
        **masks(),
    }


def off_policy(s: Setting, group: int = GROUP) -> Table:
    """RLOO on groups from μ ≠ π: what a correction costs in bias, and what it gains in noise."""
    truth = enumeration.true_gradient(s.lang, s.policy, s.rewards)
    base = rl_fn.recipes.reinforce().replace(advantage=rl_fn.components.RLOOAdvantage())
    rows = {}
    for name, correction in corrections().items():
        objective = dataclasses.replace(base, correction=correction)
        rows[name] = compare(grouped(s.lang, s.policy, objective, s.rewards, group, sampler=s.other), truth)
    return rows


def main() -> None:
    """Compute, write, print."""
    with jax.enable_x64(True):
        s = setting()
        loss = kl_as_loss(s)
        tables = {
            "kl_as_reward": kl_as_reward(s),
            "kl_off_policy": kl_off_policy(s),
            "critic_on_policy": critic_on_policy(s)
            | {f"{name}, right critic": row for name, row in critic_on_policy(s, 0.0).items()},
            "critic_off_policy": critic_off_policy(setting(distance=1.0)),
            "group_methods": group_methods([s, setting(seed=10, right=0.15)]),
            "off_policy": off_policy(setting(distance=1.0)),
        }
    text = page(loss, {TITLES[name]: rows for name, rows in tables.items()}, VOCABULARY, LENGTH)
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
