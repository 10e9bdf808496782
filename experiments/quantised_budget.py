"""The error budget of int8 rollouts on a vocabulary so small that every completion is enumerated.

python experiments/quantised_budget.py    # writes experiments/results/quantised_rollouts/budget.json

Quantiser error → log-probability error → truncation rate → bias of the policy gradient. For a model π, its int8 rollout
μ and rewards r(y), the exact gradient is g = Σ_y π(y) (r(y) − b) ∇ log π(y). What training expects instead is
ĝ = Σ_y μ(y) Σ_t w_t (r(y) − b) ∇ log π(y_t), with w = 1, truncated (TIS) or masked (IcePop) ratios of tokens, and, for
comparison, the whole sequence's ratio, which has no bias. Nothing is sampled: the bias is exact.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from rl_bridge.common.files import write_json
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import TinySource
from rl_bridge.rollout.inprocess import int8_map, quantize_linears
from rl_tools.quantize import weight_errors

RESULTS = Path(__file__).parent / "results" / "quantised_rollouts"
VOCABULARY, LENGTH, PROMPT = 8, 3, (5, 6, 7)
CAP, LOW, HIGH = 2.0, 0.5, 5.0
Weights = Callable[[torch.Tensor], torch.Tensor]
CORRECTIONS: dict[str, Weights] = {
    "none": torch.ones_like,
    "tis": lambda ratio: ratio.clamp(max=CAP),
    "icepop": lambda ratio: torch.where((ratio < LOW) | (ratio > HIGH), 0.0, ratio),
    "sequence": lambda ratio: ratio.prod(1, keepdim=True).expand_as(ratio),
}


def model_of(seed: int, sharpness: float) -> Qwen2ForCausalLM:
    """A Qwen2 of two layers. ``sharpness`` scales its matrices: trained models are sharper than new ones."""
    model = TinySource(vocabulary=VOCABULARY, hidden=32, layers=2, heads=2, max_positions=16, seed=seed).whole()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(sharpness if weight.dim() == 2 else 1.0)
    return model


def logprobs_of(model: PreTrainedModel, completions: torch.Tensor) -> torch.Tensor:
    """Of each token of the completions [N, T] after the prompt."""
    prompts = torch.tensor(PROMPT).expand(len(completions), -1)
    logits = model(torch.cat([prompts, completions], 1), use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    return logits.float().log_softmax(-1).gather(2, completions[..., None])[..., 0]


def budget_of(seed: int, sharpness: float) -> dict[str, Any]:
    """One model's budget: what quantisation does to weights, log-probabilities, ratios and the gradient."""
    model = model_of(seed, sharpness)
    source = StateSource(model)
    rollout = source.empty()
    rollout.load_state_dict(model.state_dict())
    quantize_linears(rollout, int8_map(source))
    completions = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    rewards = torch.rand(len(completions), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        mu = logprobs_of(rollout, completions)
    pi = logprobs_of(model, completions)
    exact_pi, exact_mu = pi.detach().double().sum(1).exp(), mu.double().sum(1).exp()
    assert abs(float(exact_pi.sum()) - 1) < 1e-5 and abs(float(exact_mu.sum()) - 1) < 1e-5
    ratio = (pi.detach() - mu).exp()

    def expected(of_mu: torch.Tensor) -> float:
        """The mean over tokens that the rollout draws."""
        return float((exact_mu[:, None] * of_mu.double()).sum() / LENGTH)

    def gradient(probabilities: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        advantage = rewards - float((probabilities * rewards).sum())
        loss = (probabilities.float()[:, None] * weights * advantage[:, None] * pi).sum()
        parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return torch.cat([part.flatten() for part in parts]).double()

    exact = gradient(exact_pi, torch.ones_like(ratio))
    found: dict[str, Any] = {"seed": seed, "sharpness": sharpness}
    found["quantiser_error"] = weight_errors(source, "int8", dtype=torch.float32).mean
    found["logprob_error"] = expected((pi.detach() - mu).abs())
    found["kl"] = expected(mu - pi.detach())
    found["truncated_share"] = expected((ratio > CAP).float())
    found["masked_share"] = expected(((ratio < LOW) | (ratio > HIGH)).float())
    for name, weights in CORRECTIONS.items():
        biased = gradient(exact_mu, weights(ratio))
        found[f"bias/{name}"] = float((biased - exact).norm() / exact.norm())
        found[f"cosine/{name}"] = float(torch.nn.functional.cosine_similarity(biased, exact, 0))
    return found


def budgets(seeds: int, sharpness: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """All models, from soft to sharp."""
    for factor in sharpness:
        for seed in range(seeds):
            yield budget_of(seed, factor)


def mean_rows(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The mean over the seeds of each sharpness."""
    factors = sorted({row["sharpness"] for row in rows})
    groups = [[row for row in rows if row["sharpness"] == factor] for factor in factors]
    return [{key: sum(row[key] for row in group) / len(group) for key in group[0]} for group in groups]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(budgets(arguments.seeds, (1.0, 2.0, 4.0, 6.0, 8.0)))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output / "budget.json", {"rows": rows})
    for row in mean_rows(rows):
        biases = ", ".join(f"{name} {row[f'bias/{name}']:.4f}" for name in CORRECTIONS)
        print(
            f"sharpness {row['sharpness']:g}: weights {row['quantiser_error']:.3%}, log-probabilities "
            f"{row['logprob_error']:.4f}, truncated {row['truncated_share']:.3%}, bias of the gradient: {biases}"
        )
