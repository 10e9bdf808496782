"""What the core benchmark times: each function of rl_fn beside the installed libraries' own, on the same numbers."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_fn.objectives.dialects import openrlhf, trl, tunix, verl
from rl_tools.check import openrlhf_cases, trl_losses, tunix_cases, verl_cases
from rl_tools.check.cases import load

GROUP, GAMMA, LAM = 8, 0.99, 0.95
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One function of rl_fn and one of a library that compute the same; `kind` is recursion, group or loss."""

    kind: str
    name: str
    peer: str
    ours: Call
    theirs: Call


@dataclasses.dataclass(frozen=True)
class Data:
    """The same random numbers for JAX and for torch."""

    arrays: dict[str, np.ndarray]

    @classmethod
    def random(cls, rows: int, length: int) -> "Data":
        """Rollouts without padding for recursions, with it for the rest; one reward on the last counted token."""
        rng = np.random.default_rng(0)
        shape = (rows, length)
        mask = np.arange(length)[None, :] < rng.integers(length // 4, length + 1, rows)[:, None]
        new = -rng.gamma(2.0, 0.5, shape) - 0.01
        arrays = {name: np.minimum(new + rng.normal(0, 0.1, shape), -1e-3) for name in ("old", "rollout", "ref")}
        arrays |= {name: rng.normal(size=shape) for name in ("values", "old_values", "returns", "dense")}
        arrays |= {
            "new": new,
            "advantages": rng.normal(size=(rows, 1)) * np.ones(shape),
            "scores": rng.normal(size=rows),
        }
        arrays = {name: x.astype(np.float32) for name, x in arrays.items()} | {"mask": mask}
        rewards = np.zeros(shape, np.float32)
        rewards[np.arange(rows), mask.sum(1) - 1] = arrays["scores"]
        return cls({**arrays, "rewards": rewards})

    def jax(self, name: str) -> jax.Array:
        """An array for JAX."""
        return jnp.asarray(self.arrays[name])

    def torch(self, name: str) -> torch.Tensor:
        """The same for torch; masks as numbers."""
        array = self.arrays[name]
        return torch.from_numpy(array.astype(np.float32) if array.dtype == bool else array.copy())

    def batch(self) -> rl_fn.Batch:
        """What an objective reads."""
        names = ("new", "old", "advantages", "mask", "rollout", "ref")
        return rl_fn.Batch(*(self.jax(name) for name in names))


def jitted(function: Callable[..., Any], *arrays: jax.Array | float) -> Call:
    """A call of a compiled function that waits for its result."""
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arrays))


def no_grad(call: Call) -> Call:
    """A torch call that records nothing."""

    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def recursions(d: Data) -> list[Pair]:
    """Returns and advantages along time, every position counted."""
    rewards, values = d.jax("dense"), d.jax("values")
    everywhere = jnp.ones(rewards.shape, bool)
    t_rewards, t_values = d.torch("dense"), d.torch("values")
    ones = torch.ones_like(t_rewards)
    last = torch.zeros_like(ones, dtype=torch.bool)
    last[:, -1] = True
    following = torch.cat([t_values[:, 1:], torch.zeros_like(t_values[:, :1])], dim=1)
    columns = [x[..., None] for x in (t_values, following, t_rewards, last)]
    rlax, functional = load("rlax"), load("torchrl.objectives.value.functional")
    core, tunix_core = verl_cases.core(), tunix_cases.core()
    maker = openrlhf_cases.module("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    discounts = jnp.full(rewards.shape, GAMMA).at[:, -1].set(0.0)
    next_values = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)

    def gae(r: jax.Array, v: jax.Array) -> Any:
        return rl_fn.gae(r, v, everywhere, gamma=GAMMA, lam=LAM).advantages

    def whitened(r: jax.Array, v: jax.Array) -> Any:
        return rl_fn.whiten(gae(r, v), everywhere)

    def by_rlax(r: jax.Array, v: jax.Array) -> Any:
        whole = jnp.concatenate([v, jnp.zeros_like(v[:, :1])], axis=1)
        return jax.vmap(lambda a, b, c: rlax.truncated_generalized_advantage_estimation(a, b, LAM, c))(
            r, jnp.full(r.shape, GAMMA), whole
        )

    def td(r: jax.Array, v: jax.Array) -> Any:
        return rl_fn.td_lambda(r, v, everywhere, gamma=GAMMA, lam=LAM).returns

    log_ratios = d.jax("new") - d.jax("old")
    t_new, t_old = d.torch("new")[..., None], d.torch("old")[..., None]

    def vtrace(r: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        return rl_fn.vtrace(r, v, x, everywhere, gamma=GAMMA).advantages

    def rlax_vtrace(r: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        row = lambda *a: rlax.vtrace_td_error_and_advantage(*a, 1.0).pg_advantage  # noqa: E731
        return jax.vmap(row)(v, next_values, r, discounts, jnp.exp(x))

    def returns(r: jax.Array) -> Any:
        return rl_fn.discounted_returns(r, everywhere, gamma=GAMMA)

    def rlax_returns(r: jax.Array) -> Any:
        return jax.vmap(lambda a, b: rlax.discounted_returns(a, b, 0.0))(r, jnp.full(r.shape, GAMMA))

    mask = everywhere.astype(jnp.float32)
    config = load("verl.trainer.config").AlgoConfig(gamma=GAMMA)
    ours = {
        "gae": jitted(gae, rewards, values),
        "gae, whitened": jitted(whitened, rewards, values),
        "td_lambda": jitted(td, rewards, values),
        "vtrace": jitted(vtrace, rewards, values, log_ratios),
        "discounted_returns": jitted(returns, rewards),
        "reinforce_pp": jitted(lambda r: rl_fn.whiten(returns(r), everywhere), rewards),
    }
    theirs: list[tuple[str, str, Call]] = [
        ("gae, whitened", "verl", lambda: core.compute_gae_advantage_return(t_rewards, t_values, ones, GAMMA, LAM)[0]),
        (
            "gae, whitened",
            "tunix",
            jitted(lambda *a: tunix_core.compute_gae_advantages(*a)[0], rewards, values, mask, GAMMA, LAM),
        ),
        ("gae", "openrlhf", lambda: maker.get_advantages_and_returns(None, t_values, t_rewards, ones, GAMMA, LAM)[0]),
        ("gae", "rlax", jitted(by_rlax, rewards, values)),
        ("gae", "torchrl", lambda: functional.generalized_advantage_estimate(GAMMA, LAM, *columns)[0]),
        ("gae", "torchrl vec", lambda: functional.vec_generalized_advantage_estimate(GAMMA, LAM, *columns)[0]),
        (
            "td_lambda",
            "rlax",
            jitted(
                lambda r, v: jax.vmap(lambda a, b, c: rlax.lambda_returns(a, b, c, LAM))(r, discounts, v),
                rewards,
                next_values,
            ),
        ),
        (
            "td_lambda",
            "torchrl vec",
            lambda: functional.vec_td_lambda_return_estimate(GAMMA, LAM, *columns[1:]),
        ),
        ("vtrace", "rlax", jitted(rlax_vtrace, rewards, values, log_ratios)),
        ("vtrace", "torchrl", lambda: functional.vtrace_advantage_estimate(GAMMA, t_new, t_old, *columns)[0]),
        ("discounted_returns", "openrlhf", lambda: maker.get_cumulative_returns(None, t_rewards, ones, GAMMA)),
        ("discounted_returns", "rlax", jitted(rlax_returns, rewards)),
        ("discounted_returns", "torchrl", lambda: functional.reward2go(columns[2], columns[3], GAMMA)),
        (
            "reinforce_pp",
            "verl",
            lambda: core.compute_reinforce_plus_plus_outcome_advantage(t_rewards, ones, config=config)[0],
        ),
    ]
    return [Pair("recursion", name, peer, ours[name], no_grad(call)) for name, peer, call in theirs]


def groups(d: Data) -> list[Pair]:
    """Outcome advantages of groups of GROUP answers, spread over the tokens."""
    core = verl_cases.core()
    scores, mask = d.jax("scores").reshape(-1, GROUP), d.jax("mask").reshape(-1, GROUP, d.arrays["mask"].shape[1])
    t_rewards, t_mask = d.torch("rewards"), d.torch("mask")
    index = np.repeat(np.arange(len(t_rewards) // GROUP), GROUP)
    out = []
    names = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
    config = load("verl.trainer.config").AlgoConfig()
    for name in (*names, "reinforce_plus_plus_baseline"):
        objective = verl({"algorithm.adv_estimator": name})
        given = {"token_level_rewards": t_rewards, "response_mask": t_mask, "index": index, "config": config}

        def theirs(name: str = name, given: dict[str, Any] = given) -> Any:
            return core.get_adv_estimator_fn(name)(**{**given, "token_level_rewards": t_rewards.clone()})[0]

        ours = jitted(lambda r, m, o=objective: o.advantages(rl_fn.Rollouts(r, m)).advantages, scores, mask)
        out.append(Pair("group", name, "verl", ours, no_grad(theirs)))
    return out


def _torch_step(loss: Callable[[torch.Tensor], torch.Tensor], new: torch.Tensor, backward: bool) -> Call:
    def run() -> Any:
        if not backward:
            with torch.no_grad():
                return loss(new)
        x = new.detach().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    return run


def losses(d: Data) -> list[Pair]:
    """Policy losses to one number, and to its gradient."""
    core, new, batch = verl_cases.core(), d.torch("new"), d.batch()
    old, advantages, mask, ref = (d.torch(name) for name in ("old", "advantages", "mask", "ref"))
    out: list[Pair] = []

    def add(name: str, peer: str, objective: Any, theirs: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def value(x: jax.Array) -> jax.Array:
            return objective(batch._replace(logprobs=x))[0]

        forward, gradient = jitted(value, batch.logprobs), jitted(jax.grad(value), batch.logprobs)
        out.append(Pair("loss", name, peer, forward, _torch_step(theirs, new, backward=False)))
        out.append(Pair("loss", f"{name}, backward", peer, gradient, _torch_step(theirs, new, backward=True)))

    modes = ("vanilla", "gspo", "sapo", "cispo", "geo_mean", "gpg", "dppo_tv", "dppo_kl", "dro")
    for mode in modes:
        options = {"actor.policy_loss.loss_mode": mode, "actor.policy_loss.dro_beta": 0.3}
        config = verl_cases.actor_config(options)

        def policy(x: torch.Tensor, mode: str = mode, config: Any = config) -> torch.Tensor:
            return core.get_policy_loss_fn(mode)(old, x, advantages, mask.bool(), "token-mean", config)[0]

        add(mode, "verl", verl(options), policy)
    kl = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
    config = verl_cases.actor_config(kl)

    def with_kl(x: torch.Tensor) -> torch.Tensor:
        policy = core.compute_policy_loss_vanilla(old, x, advantages, mask.bool(), "token-mean", config)[0]
        penalty = core.kl_penalty(x, ref, config.kl_loss_type)
        return policy + config.kl_loss_coef * core.agg_loss(penalty, mask, "token-mean")

    add("vanilla + k3", "verl", verl(kl), with_kl)
    policy_loss = openrlhf_cases.module("models.loss").PolicyLoss
    for kind in ("ppo", "gspo"):
        module = policy_loss(policy_loss_type=kind)
        options = {"actor.policy_loss_type": kind, "algo.kl.init_coef": 0.0}
        add(kind, "openrlhf", openrlhf(options), lambda x, m=module: m(x, old, advantages, mask)[0])
    tensors = {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages, "mask": mask}
    tensors |= {"entropies": torch.ones_like(new), "rollout_logprobs": d.torch("rollout")}
    for kind in ("dapo", "grpo", "sapo", "vespo"):
        options = {"loss_type": kind}
        add(kind, "trl", trl(options), trl_losses.loss_of(options, tensors))
    return [*out, *_tunix(d), *_value(d)]


def _tunix(d: Data) -> list[Pair]:
    """tunix's grpo_loss_fn under jit, on given log-probabilities."""
    options = {"beta": 0.04, "kl_loss_mode": "low_var_kl"}
    batch, mask = d.batch(), d.jax("mask").astype(jnp.float32)
    data = types.SimpleNamespace(
        prompt_ids=None,
        completion_ids=None,
        completion_mask=mask,
        advantages=batch.advantages,
        old_per_token_logps=batch.old_logprobs,
        ref_per_token_logps=batch.ref_logprobs,
        sampler_is_weights=None,
    )
    theirs = tunix_cases.loss_of(options, data, jnp.zeros((*mask.shape, 2)))

    def ours(x: jax.Array) -> jax.Array:
        return tunix(options)(batch._replace(logprobs=x))[0]

    out = []
    for name, f, g in (("grpo + k3", ours, theirs), ("grpo + k3, backward", jax.grad(ours), jax.grad(theirs))):
        out.append(Pair("loss", name, "tunix", jitted(f, batch.logprobs), jitted(g, batch.logprobs)))
    return out


def _value(d: Data) -> list[Pair]:
    """The clipped value loss."""
    core = verl_cases.core()
    values, old, returns, mask = (d.jax(name) for name in ("values", "old_values", "returns", "mask"))
    t_old, t_returns, t_mask = (d.torch(name) for name in ("old_values", "returns", "mask"))

    def ours(v: jax.Array) -> jax.Array:
        return 0.5 * rl_fn.aggregate(rl_fn.value_clip(v, old, returns, mask, clip=0.5), mask, "token-mean")

    def theirs(v: torch.Tensor) -> torch.Tensor:
        return core.compute_value_loss(v, t_returns, t_old, t_mask, 0.5)[0]

    forward, backward = (_torch_step(theirs, d.torch("values"), backward=b) for b in (False, True))
    return [
        Pair("loss", "value_clip", "verl", jitted(ours, values), forward),
        Pair("loss", "value_clip, backward", "verl", jitted(jax.grad(ours), values), backward),
    ]
