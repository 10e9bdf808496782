"""TRL's preference losses, run from the installed trainers: DPO's loss types and divergences, KTO, CPO, ORPO, GKD."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as functional

import rl_fn
from rl_tools.check.cases import Case, Example, Numbers, jax_numbers, load, run_branch, torch_numbers

Sums = tuple[Any, Any, Any, Any]
DPO: dict[str, tuple[Callable[..., jax.Array], dict[str, float]]] = {
    "sigmoid": (rl_fn.dpo, {}),
    "hinge": (rl_fn.hinge, {}),
    "exo_pair": (rl_fn.exo, {"label_smoothing": 0.1}),
    "nca_pair": (rl_fn.nca, {}),
    "robust": (rl_fn.dpo_robust, {"label_smoothing": 0.1}),
    "bco_pair": (rl_fn.bco, {}),
    "sppo_hard": (rl_fn.sppo, {}),
    "aot": (rl_fn.aot, {"label_smoothing": 0.1}),
    "aot_unpaired": (rl_fn.aot_unpaired, {"label_smoothing": 0.1}),
    "apo_zero": (rl_fn.apo_zero, {}),
    "apo_down": (rl_fn.apo_down, {}),
    "discopop": (rl_fn.discopop, {"tau": 0.05}),
}
BETA = 0.1


def sums(x: Any, ref: Any, mask: Any) -> Sums:
    """Sums over the tokens of each answer: chosen, rejected, and the reference's; answers alternate."""
    new, fixed = (x * mask).sum(-1), (ref * mask).sum(-1)
    return new[0::2], new[1::2], fixed[0::2], fixed[1::2]


def _ours(function: Callable[..., jax.Array]) -> Callable[[Example], Numbers]:
    """Mean of a function of the four sums and the mask of the rows."""

    def run(example: Example) -> Numbers:
        mask, ref = jnp.asarray(example.mask, jnp.float32), jnp.asarray(example.ref_logprobs)
        return jax_numbers(lambda x: function(*sums(x, ref, mask), mask).mean(), example.logprobs)

    return run


def _dpo_peer(kind: str, divergence: str, alpha: float, smoothing: float) -> Callable[[Example], Numbers]:
    def run(example: Example) -> Numbers:
        trainer, t = load("trl.trainer.dpo_trainer").DPOTrainer, example.torch()
        chosen, rejected, ref_chosen, ref_rejected = sums(t["logprobs"], t["ref_logprobs"], t["mask"])
        me = types.SimpleNamespace(
            beta=BETA,
            f_divergence_type=divergence,
            f_alpha_divergence_coef=alpha,
            loss_types=[kind],
            loss_weights=[1.0],
            label_smoothing=smoothing,
            use_weighting=False,
            args=types.SimpleNamespace(discopop_tau=0.05),
        )
        variables = {
            "self": me,
            "device": "cpu",
            "F": functional,
            "chosen_logps": chosen,
            "rejected_logps": rejected,
            "ref_chosen_logps": ref_chosen,
            "ref_rejected_logps": ref_rejected,
            "chosen_logratios": chosen - ref_chosen,
            "rejected_logratios": rejected - ref_rejected,
            "completion_mask": torch.cat([t["mask"][0::2], t["mask"][1::2]]),
            "loss": 0.0,
        }
        scores = run_branch(trainer._compute_loss, "self.f_divergence_type", "chosen_scores", variables)
        names = {name: scores[name] for name in ("chosen_scores", "rejected_scores")}
        variables |= {**names, "delta_score": names["chosen_scores"] - names["rejected_scores"]}
        out = run_branch(trainer._compute_loss, "self.loss_types", "per_sequence_loss", variables)
        return torch_numbers(out["loss"], t["logprobs"])

    return run


def _ipo(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, mask: Any) -> jax.Array:
    long = [jnp.maximum(mask[i::2].sum(-1), 1.0) for i in (0, 1)]
    averaged = [x / long[i % 2] for i, x in enumerate((chosen, rejected, ref_chosen, ref_rejected))]
    return rl_fn.ipo(*averaged, beta=BETA)


def _norm(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, mask: Any) -> jax.Array:
    long = mask.sum(-1)
    return rl_fn.dpo_norm(chosen, rejected, ref_chosen, ref_rejected, long[0::2], long[1::2], beta=BETA)


def _dpo_cases() -> list[Case]:
    out = []
    for kind, (function, constants) in DPO.items():
        smoothing = constants.get("label_smoothing", 0.0)

        def ours(*args: Any, f: Callable[..., jax.Array] = function, c: dict[str, float] = constants) -> jax.Array:
            return f(*args[:4], beta=BETA, **c)

        name = f"pairs DPO loss_type={kind}"
        out.append(Case(name, _dpo_peer(kind, "reverse_kl", 1.0, smoothing), _ours(ours)))
    peer = _dpo_peer("ipo", "reverse_kl", 1.0, 0.0)
    summed = _ours(lambda *a: rl_fn.ipo(*a[:4], beta=BETA))
    note = "averaged over the tokens; the last column is IPO of the sums, as OpenRLHF has it"
    out.append(Case("pairs DPO loss_type=ipo", peer, _ours(_ipo), summed, note=note))
    out.append(
        Case("pairs DPO loss_type=sigmoid_norm", _dpo_peer("sigmoid_norm", "reverse_kl", 1.0, 0.0), _ours(_norm))
    )
    divergences = (("forward_kl", "forward_kl", 0.0), ("js_divergence", "js", 0.0), ("alpha_divergence", "alpha", 0.3))
    for divergence, name, alpha in divergences:

        def by_f(*a: Any, name: str = name, alpha: float = alpha) -> jax.Array:
            return rl_fn.f_dpo(*a[:4], divergence=name, alpha=1.0 - alpha, beta=BETA)  # pyright: ignore[reportArgumentType]

        out.append(
            Case(f"pairs DPO f_divergence={divergence}", _dpo_peer("sigmoid", divergence, alpha, 0.0), _ours(by_f))
        )
    return out


def _kto(example: Example) -> Numbers:
    trainer, t = load("trl.trainer.kto_trainer").KTOTrainer, example.torch()
    chosen, rejected, ref_chosen, ref_rejected = sums(t["logprobs"], t["ref_logprobs"], t["mask"])
    kl = torch.tensor([0.2])
    me = types.SimpleNamespace(loss_type="kto", beta=BETA)
    variables = {"self": me, "kl": kl, "F": functional}
    good = run_branch(
        trainer._compute_loss, "self.loss_type", "chosen_losses", {**variables, "chosen_logratios": chosen - ref_chosen}
    )
    bad = run_branch(
        trainer._compute_loss,
        "self.loss_type",
        "rejected_losses",
        {**variables, "rejected_logratios": rejected - ref_rejected},
    )
    losses = torch.cat([good["chosen_losses"], 1.5 * bad["rejected_losses"]])
    return torch_numbers(losses.mean(), t["logprobs"])


def _our_kto(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, _: Any) -> jax.Array:
    good = jnp.arange(2 * len(chosen)) < len(chosen)
    new, ref = jnp.concatenate([chosen, rejected]), jnp.concatenate([ref_chosen, ref_rejected])
    return rl_fn.kto(new, ref, good, 0.2, beta=BETA, undesirable_weight=1.5)


def _method(module: str, trainer: str, method: str, mean: bool, **fields: Any) -> Callable[[Example], Numbers]:
    """A method of a trainer on chosen and rejected log-probabilities, summed or averaged over tokens."""

    def run(example: Example) -> Numbers:
        t = example.torch()
        accelerator = types.SimpleNamespace(device="cpu")
        me = types.SimpleNamespace(**fields, accelerator=accelerator)
        chosen, rejected, _, _ = sums(t["logprobs"], t["ref_logprobs"], t["mask"])
        if mean:
            chosen, rejected = chosen / t["mask"][0::2].sum(-1), rejected / t["mask"][1::2].sum(-1)
        losses = getattr(getattr(load(f"trl.experimental.{module}"), trainer), method)(me, chosen, rejected)[0]
        # ORPO's method returns β log σ(log odds), which its caller takes off the likelihood of the chosen answer.
        total = (-chosen - losses).mean() if trainer == "ORPOTrainer" else losses.mean()
        return torch_numbers(total, t["logprobs"])

    return run


def _averaged(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(chosen: Any, rejected: Any, _: Any, __: Any, mask: Any) -> jax.Array:
        return function(chosen / mask[0::2].sum(-1), rejected / mask[1::2].sum(-1))

    return run


def _gkd(beta: float) -> Case:
    """Rows of log-probabilities stand for logits: any number will do."""

    def peer(example: Example) -> Numbers:
        t = example.torch()
        function = load("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
        logits = t["logprobs"][None]
        return torch_numbers(function(logits, t["ref_logprobs"][None], beta=beta, reduction="sum"), t["logprobs"])

    def ours(example: Example) -> Numbers:
        teacher = jnp.asarray(example.ref_logprobs)
        return jax_numbers(lambda x: rl_fn.gkd(x, teacher, beta=beta).sum(), example.logprobs)

    return Case(f"distillation gkd beta={beta}", peer, ours)


def cases() -> list[Case]:
    """All that can be reached without a model."""
    cpo = {"beta": BETA, "alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.5}
    module, method = "cpo.cpo_trainer", "cpo_loss"

    def contrast(chosen: Any, rejected: Any, *_: Any) -> jax.Array:
        return rl_fn.cpo(chosen, rejected, beta=BETA, alpha=0.0)

    simpo = _averaged(lambda c, r: rl_fn.simpo(c, r, beta=2.0, gamma=0.5))
    orpo = _averaged(lambda c, r: rl_fn.orpo(c, r, lam=BETA))
    return [
        *_dpo_cases(),
        Case("pairs KTO", _kto, _ours(_our_kto)),
        Case("pairs CPO", _method(module, "CPOTrainer", method, False, loss_type="sigmoid", **cpo), _ours(contrast)),
        Case(
            "pairs SimPO",
            _method(module, "CPOTrainer", method, True, loss_type="simpo", **{**cpo, "beta": 2.0}),
            _ours(simpo),
        ),
        Case(
            "pairs ORPO", _method("orpo.orpo_trainer", "ORPOTrainer", "odds_ratio_loss", True, beta=BETA), _ours(orpo)
        ),
        *(_gkd(beta) for beta in (0.0, 0.3, 1.0)),
    ]
