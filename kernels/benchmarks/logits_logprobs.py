"""Log-probabilities from logits that are there: memory and time, forward and backward, ours against others' ways.

    python kernels/benchmarks/logits_logprobs.py

On a GPU the vocabularies of two models in bfloat16, on a CPU a small one in float32. The loss is REINFORCE with an
advantage a response and an entropy bonus. Ways whose library is not installed are listed as missing.
"""

import argparse
from typing import Any

import torch
from harness import RESULTS, cells, child, device, disagreements, everything, facts, preamble
from limits import MODELS

from rl_bridge.common.files import replacing, write_json
from rl_kernels import logits_logprobs

LENGTH = 512
SMALL = {"groups": 1, "length": 8, "vocabulary": 128}


def problem(case: dict[str, int], on: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits [G, L, V], tokens and advantages [G, L]."""
    g = torch.Generator(on).manual_seed(0)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    shape = case["groups"], case["length"]
    logits = torch.randn(*shape, case["vocabulary"], device=on, dtype=dtype, generator=g).mul_(3.0).requires_grad_()
    tokens = torch.randint(case["vocabulary"], shape, device=on, generator=g)
    return [logits], {"tokens": tokens, "advantages": torch.randn(shape[0], 1, device=on, generator=g)}


def loss(logprobs: torch.Tensor, entropy: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -(logprobs.float() * advantages + 0.01 * entropy.float()).sum() / logprobs.numel()


def _both(logits, tokens):
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def plain(logits, tokens, advantages):
    return loss(*_both(logits, tokens), advantages)


def compiled(logits, tokens, advantages):
    return loss(*torch.compile(_both, dynamic=True)(logits, tokens), advantages)


def trl(logits, tokens, advantages):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return loss(*selective_log_softmax_and_entropy(logits, tokens), advantages)


def _ours(backend, **options):
    def way(logits, tokens, advantages):
        if backend == "triton" and not logits.is_cuda:
            raise ImportError("needs a GPU")
        found = logits_logprobs(logits, tokens, backend=backend, **options)
        return loss(found.logprobs, found.entropy, advantages)

    return way


WAYS = {
    "log_softmax": plain,
    "the same under torch.compile": compiled,
    "TRL selective_log_softmax_and_entropy": trl,
    "ours, torch": _ours("torch"),
    "ours, torch, in place": _ours("torch", inplace_backward=True),
    "ours, triton": _ours("triton"),
    "ours, triton, in place": _ours("triton", inplace_backward=True),
}


def cases(groups: list[int] | None, vocabulary: int) -> list[dict[str, int]]:
    """N = 8192 and 512·G of each model's vocabulary on a GPU, one vocabulary on a CPU."""
    if device().type == "cuda":
        vocabularies, groups = [vocabulary for _, vocabulary in MODELS.values()], groups or [16, 64, 128, 256]
    else:
        vocabularies, groups = [vocabulary], groups or [2, 4, 8]
    return [{"groups": g, "length": LENGTH, "vocabulary": v} for v in vocabularies for g in groups]


def table(result: dict[str, Any]) -> str:
    width = 4 if result["device"] == "cpu" else 2
    lines = [
        "# Log-probabilities and entropies from logits\n",
        preamble(result),
        f"Forward and backward over G responses of {LENGTH} tokens. Memory is the peak above the logits, first beyond "
        "their gradient (negative where that is written over them), then in all.\n",
        "Not measured: a GPU (none was at hand), and whatever is named missing."
        if result["device"] == "cpu"
        else "Not measured: whatever is named missing.",
    ]
    for case in result["cases"]:
        rows = case["groups"] * case["length"]
        lines += [
            f"\n## G = {case['groups']}: N = {rows}, V = {case['vocabulary']}; "
            f"logits {width * rows * case['vocabulary'] / 2**20:.0f} MiB\n",
            "| way | beyond the gradient (MiB) | in all (MiB) | forward (s) | forward + backward (s) |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join([row['way'], *cells(row)])} |" for row in result["rows"] if row["case"] == case),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=lambda s: [int(x) for x in s.split(",")], help="responses, comma-separated")
    parser.add_argument("--vocabulary", type=int, default=32000, help="on a CPU")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--name", help="of the results; logits_logprobs_cpu or logits_logprobs_cuda without it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        child(WAYS, problem, arguments.one)
        return
    found = cases(arguments.groups, arguments.vocabulary)
    ways = [way for way in WAYS if arguments.only in way]
    where = facts(arguments.threads)
    rows = everything(__file__, ways, found, SMALL, turns=arguments.turns, threads=arguments.threads)
    kind = device().type
    result = {"device": kind, "facts": where, "turns": arguments.turns, "cases": found, "rows": rows}
    result["disagreements"] = disagreements(rows, 1e-3 if kind == "cpu" else 2e-2)
    stem = arguments.name or f"logits_logprobs_{kind}"
    write_json(RESULTS / f"{stem}.json", result)
    with replacing(RESULTS / f"{stem}.md") as path:
        path.write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
