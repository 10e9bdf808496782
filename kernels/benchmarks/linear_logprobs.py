"""Log-probabilities from hidden states: memory and time, forward and backward, ours against others' ways.

    python kernels/benchmarks/linear_logprobs.py                # this device's cases; JSON, table and plot in results/
    python kernels/benchmarks/linear_logprobs.py --groups 4 --turns 1

On a GPU the shapes are those of two models in bfloat16, on a CPU a small head in float32. One response has 512 tokens;
the loss is REINFORCE with an advantage a response. Ways whose library is not installed are listed as missing.
"""

import argparse
from typing import Any

import matplotlib
import torch
from harness import RESULTS, cells, child, device, disagreements, everything, facts, preamble
from limits import MODELS, Head

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from rl_bridge.common.files import replacing, write_json
from rl_kernels import linear_logprobs, linear_policy_loss
from rl_kernels.backends import refusal

LENGTH = 512
SMALL = {"groups": 1, "length": 8, "hidden_size": 64, "vocabulary": 128}


def problem(case: dict[str, int], on: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Hidden states [N, H] and weight [V, H], and tokens [N] with advantages [N], one a response."""
    g = torch.Generator(on).manual_seed(0)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    groups, length, vocabulary = case["groups"], case["length"], case["vocabulary"]
    hidden, weight = (
        torch.randn(rows, case["hidden_size"], device=on, dtype=dtype, generator=g).mul_(scale).requires_grad_()
        for rows, scale in ((groups * length, 1.0), (vocabulary, 3.0 * case["hidden_size"] ** -0.5))
    )
    tokens = torch.randint(vocabulary, (groups * length,), device=on, generator=g)
    advantages = torch.randn(groups, 1, device=on, generator=g).expand(groups, length).reshape(-1)
    return [hidden, weight], {"tokens": tokens, "advantages": advantages}


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -(logprobs.float() * advantages).sum() / len(advantages)


def _gathered(hidden, weight, tokens):
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, tokens[:, None])[:, 0]


def plain(hidden, weight, tokens, advantages):
    return reinforce(_gathered(hidden, weight, tokens), advantages)


def compiled(hidden, weight, tokens, advantages):
    return reinforce(torch.compile(_gathered, dynamic=True)(hidden, weight, tokens), advantages)


def torch_chunked(hidden, weight, tokens, advantages):
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no chunked F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    losses = torch.nn.functional.linear_cross_entropy(hidden, weight, tokens, reduction="none", options=options)
    return reinforce(-losses, advantages)


def trl_selective(hidden, weight, tokens, advantages):
    from trl.trainer.utils import selective_log_softmax

    length = min(LENGTH, len(tokens))
    logits = (hidden @ weight.T).view(-1, length, len(weight))
    return reinforce(selective_log_softmax(logits, tokens.view(-1, length)).view(-1), advantages)


def trl_chunked(hidden, weight, tokens, advantages):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    results = ChunkedLogProbFunction.apply(
        hidden, weight, None, tokens, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
    )
    return reinforce(results[0], advantages)


def liger(hidden, weight, tokens, advantages):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses = liger_fused_linear_cross_entropy(hidden, weight, tokens, reduction="none")
    return reinforce(-losses, advantages)


def liger_grpo(hidden, weight, tokens, advantages):
    """Its loss at ratios of 1 has REINFORCE's gradient."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = min(LENGTH, len(tokens))
    ids = tokens.view(-1, length)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=hidden.is_cuda)
    counted = torch.ones(ids.shape, device=ids.device)
    states = hidden.view(*ids.shape, hidden.shape[-1])
    return loss(states, weight, ids, counted, advantages.view(-1, length)[:, 0])[0]


def quack(hidden, weight, tokens, advantages):
    """Its way with a loss a token; the chunked ones have a mean or a sum alone, and no gradient for each token."""
    from quack.linear_cross_entropy import linear_cross_entropy_func

    losses = linear_cross_entropy_func(hidden, weight, None, tokens, reduction="none", inplace_backward=True)
    return reinforce(-losses, advantages)


def cut_cross_entropy(hidden, weight, tokens, advantages):
    from cut_cross_entropy import linear_cross_entropy

    losses = linear_cross_entropy(hidden, weight, tokens, reduction="none", filter_eps=None)
    return reinforce(-losses, advantages)


def _ours(backend, **options):
    def way(hidden, weight, tokens, advantages):
        reason = refusal(backend, hidden.device.type)
        if reason:
            raise ImportError(reason)
        return reinforce(linear_logprobs(hidden, weight, tokens, backend=backend, **options).logprobs, advantages)

    return way


def _fused(**options):
    def way(hidden, weight, tokens, advantages):
        def loss(logprobs, entropy, logsumexp, rows):
            return -(logprobs * advantages[rows]).sum() / len(advantages)

        return linear_policy_loss(hidden, weight, tokens, loss, fused=True, **options)[0]

    return way


def _only_on_a_gpu(way, capability=None):
    def checked(hidden, *rest, **more):
        if not hidden.is_cuda:
            raise ImportError("needs a GPU")
        if capability and (torch.version.hip or torch.cuda.get_device_capability(hidden.device) != capability):
            raise ImportError(f"needs compute capability {'.'.join(map(str, capability))}")
        return way(hidden, *rest, **more)

    return checked


WAYS = {
    "log_softmax + gather": plain,
    "the same under torch.compile": compiled,
    "TRL selective_log_softmax": trl_selective,
    "TRL chunked": trl_chunked,
    "F.linear_cross_entropy, chunked": torch_chunked,
    "Liger": _only_on_a_gpu(liger),
    "Liger fused GRPO": liger_grpo,
    "Liger scaled CE, through ours": _only_on_a_gpu(_ours("liger"), (9, 0)),
    "QuACK": _only_on_a_gpu(quack),
    "cut-cross-entropy": _only_on_a_gpu(cut_cross_entropy),
    "ours, triton": _only_on_a_gpu(_ours("triton")),
    "ours, triton, workspace of 256 MiB": _only_on_a_gpu(_ours("triton", workspace=256 << 20)),
    "ours, torch": _ours("torch"),
    "ours, triton_matmul": _only_on_a_gpu(_ours("triton_matmul")),
    "ours, gluon": _only_on_a_gpu(_ours("gluon")),
    "ours, fused": _fused(),
    "ours, fused, workspace of 512 MiB": _only_on_a_gpu(_fused(workspace=512 << 20)),
}


def cases(groups: list[int] | None, hidden_size: int, vocabulary: int) -> list[dict[str, int]]:
    """N = 8192 and 512·G of each model on a GPU, one head on a CPU."""
    if device().type == "cuda":
        shapes = list(MODELS.values())
        groups = groups or [16, 64, 128, 256]
    else:
        shapes, groups = [(hidden_size, vocabulary)], groups or [4, 8, 16]
    return [{"groups": g, "length": LENGTH, "hidden_size": h, "vocabulary": v} for h, v in shapes for g in groups]


def table(result: dict[str, Any]) -> str:
    lines = [
        "# Log-probabilities from hidden states\n",
        preamble(result),
        f"Forward and backward of REINFORCE's loss over G responses of {LENGTH} tokens. Memory is the peak above the "
        "inputs, first beyond the gradients of hidden states and weight, then in all. Ours has the entropy too, TRL's "
        "chunked way as well; the others do not. TRL's chunked way has a Triton kernel for GPUs, and elsewhere torch's "
        "operations on tiles of 4096 by 32768.\n",
        "Not measured: a GPU (none was at hand), and whatever is named missing."
        if result["device"] == "cpu"
        else "Not measured: whatever is named missing.",
    ]
    for case in result["cases"]:
        rows = case["groups"] * case["length"]
        head = Head(rows, case["hidden_size"], case["vocabulary"], 4 if result["device"] == "cpu" else 2)
        lines += [
            f"\n## G = {case['groups']}: N = {rows}, H = {case['hidden_size']}, V = {case['vocabulary']}; "
            f"logits {head.logits() / 2**20:.0f} MiB, gradients {head.gradients() / 2**20:.0f} MiB\n",
            "| way | beyond gradients (MiB) | in all (MiB) | forward (s) | forward + backward (s) |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join([row['way'], *cells(row)])} |" for row in result["rows"] if row["case"] == case),
        ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Any) -> None:
    """Memory beyond the gradients, and time, over G: one line a way, for the first head."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    first = result["cases"][0]
    shape = {k: v for k, v in first.items() if k != "groups"}
    for way in WAYS:
        rows = [r for r in result["rows"] if r["way"] == way and "extra" in r and shape.items() <= r["case"].items()]
        if rows:
            groups = [row["case"]["groups"] for row in rows]
            style = "-o" if way.startswith("ours") else "--s"
            left.plot(groups, [(r["extra"] - r["gradients"]) / 2**20 for r in rows], style, label=way, markersize=4)
            right.plot(groups, [r["both_s"] for r in rows], style, label=way, markersize=4)
    for axes, label in ((left, "peak beyond inputs and gradients (MiB)"), (right, "forward + backward (s)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [case["groups"] for case in result["cases"] if shape.items() <= case.items()], ticks)
        axes.set_xlabel(f"responses of {first['length']} tokens, H = {first['hidden_size']}, V = {first['vocabulary']}")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=lambda s: [int(x) for x in s.split(",")], help="responses, comma-separated")
    parser.add_argument("--hidden-size", type=int, default=512, help="hidden size on a CPU")
    parser.add_argument("--vocabulary", type=int, default=32000, help="on a CPU")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--name", help="of the results; linear_logprobs_cpu or linear_logprobs_cuda without it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        child(WAYS, problem, arguments.one)
        return
    found = cases(arguments.groups, arguments.hidden_size, arguments.vocabulary)
    ways = [way for way in WAYS if arguments.only in way]
    where = facts(arguments.threads)
    rows = everything(__file__, ways, found, SMALL, turns=arguments.turns, threads=arguments.threads)
    kind = device().type
    result = {"device": kind, "facts": where, "turns": arguments.turns, "cases": found, "rows": rows}
    result["disagreements"] = disagreements(rows, 1e-3 if kind == "cpu" else 2e-2)
    stem = arguments.name or f"linear_logprobs_{kind}"
    write_json(RESULTS / f"{stem}.json", result)
    with replacing(RESULTS / f"{stem}.md") as path:
        path.write_text(table(result), encoding="utf-8")
    with replacing(RESULTS / f"{stem}.png") as path:
        plot(result, path)


if __name__ == "__main__":
    main()
