"""What a teacher reports for distillation: the k most probable tokens and their log-probabilities, ours against whole
logits.

    python kernels/benchmarks/topk_logprobs.py                      # on a GPU: JSON and table in results/
    python kernels/benchmarks/topk_logprobs.py --output FOLDER      # on a CPU: at a small size

Forward only, from hidden states and from logits. The ways in PyTorch take any of equal logits, ours the lower id: the
table says what share of the rows' ids are others. Memory is the peak above inputs, on a GPU. On a CPU it only shows
that the script runs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, device, facts
from limits import MODELS
from timing import compare

from rl_bridge.common.files import replacing, write_json
from rl_kernels import linear_topk_logprobs, topk_logprobs

Result = tuple[torch.Tensor, torch.Tensor]


def whole(logits: torch.Tensor, k: int) -> Result:
    values, ids = torch.log_softmax(logits.float(), -1).topk(k, -1)
    return ids, values


def normalised_after(logits: torch.Tensor, k: int) -> Result:
    values, ids = logits.topk(k, -1)
    return ids, values.float() - logits.float().logsumexp(-1, keepdim=True)


def ways(on: torch.device) -> dict[str, dict[str, Callable[..., Result]]]:
    """By what they start from. Compiled ones on a GPU alone: on a CPU compiling takes longer than all the rest."""
    from_logits: dict[str, Callable[..., Result]] = {
        "ours": lambda logits, k: topk_logprobs(logits, k)[:2],
        "log_softmax, topk": whole,
        "topk, logsumexp": normalised_after,
    }
    from_hidden: dict[str, Callable[..., Result]] = {
        "ours": lambda hidden, weight, k: linear_topk_logprobs(hidden, weight, k)[:2],
        "ours, workspace of 2 GiB": lambda hidden, weight, k: linear_topk_logprobs(
            hidden, weight, k, workspace=2 << 30
        )[:2],
        "product, topk, logsumexp": lambda hidden, weight, k: normalised_after(hidden @ weight.T, k),
    }
    if on.type == "cuda":
        from_logits["topk, logsumexp, compiled"] = torch.compile(normalised_after, dynamic=False)
        # "ours" is what is chosen; on a CPU Triton has its interpreter only, which is no measurement.
        for backend in ("triton", "torch"):
            from_logits[f"ours-{backend}"] = lambda logits, k, b=backend: topk_logprobs(logits, k, backend=b)[:2]
            from_hidden[f"ours-{backend}"] = lambda hidden, weight, k, b=backend: linear_topk_logprobs(
                hidden, weight, k, backend=b
            )[:2]
    return {"logits": from_logits, "hidden states": from_hidden}


def problem(rows: int, hidden_size: int, vocabulary: int, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(on).manual_seed(0)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    hidden = torch.randn(rows, hidden_size, device=on, generator=g)
    weight = torch.randn(vocabulary, hidden_size, device=on, generator=g) * (3.0 * hidden_size**-0.5)
    return hidden.to(dtype), weight.to(dtype)


def extra(call: Callable[[], Any], on: torch.device) -> int | None:
    """Bytes at the peak above what there was, on a GPU."""
    if on.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(on: torch.device, turns: int) -> list[dict[str, Any]]:
    big = on.type == "cuda"
    found: list[dict[str, Any]] = []
    for hidden_size, vocabulary in MODELS.values() if big else [(64, 4096)]:
        for rows in (8192, 32768) if big else (16,):
            hidden, weight = problem(rows, hidden_size, vocabulary, on)
            # Whole logits of the larger case do not fit beside their float32 copy: that way says so.
            for start, named in ways(on).items():
                inputs = (hidden @ weight.T,) if start == "logits" else (hidden, weight)
                for k in (8, 64):
                    calls = {n: [lambda way=way, k=k, x=inputs: way(*x, k)] for n, way in named.items()}
                    for name, result in compare(calls, on, turns).items():
                        if "seconds" in result:
                            result["extra"] = extra(calls[name][0], on)
                            ids, ours = (calls[n][0]()[0].sort(-1).values for n in (name, "ours"))
                            result["others"] = (ids != ours).double().mean().item()
                        case = {
                            "from": start,
                            "rows": rows,
                            "hidden_size": hidden_size,
                            "vocabulary": vocabulary,
                            "k": k,
                        }
                        found.append({**case, "way": name, **result})
                        print(found[-1], flush=True)
                del inputs
    return found


def table(result: dict[str, Any]) -> str:
    info = result["facts"]
    reached = f"a product {1e3 * info['reached']['tflops']:.0f} GFLOP/s, a copy {info['reached']['gbs']:.0f} GB/s"
    lines = [
        f"{info['hardware']}; {info['date']}; reached by {reached}; median of {result['turns']} turns. "
        + ", ".join(f"{name} {number}" for name, number in info["versions"].items())
        + ".",
        "",
        "| from | N | H | V | k | way | ms | quartiles | MiB | other ids |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        case = "| " + " | ".join(str(row[n]) for n in ("from", "rows", "hidden_size", "vocabulary", "k", "way"))
        if "seconds" not in row:
            lines.append(f"{case} | {row['missing'].replace('|', '/')} | | | |")
            continue
        low, high = (f"{1e3 * q:.2f}" for q in row["quartiles"])
        memory = "not measured" if row["extra"] is None else f"{row['extra'] / 2**20:.0f}"
        lines.append(f"{case} | {1e3 * row['seconds']:.2f} | {low} … {high} | {memory} | {row['others']:.4f} |")
    if info["threads"]:
        lines += [
            "",
            "On a CPU, in seconds of its time: memory, compiled ways, Triton and the real sizes are not measured.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on = device()
    parser.add_argument("--turns", type=int, default=10 if on.type == "cuda" else 3)
    parser.add_argument("--output", type=Path, default=RESULTS if on.type == "cuda" else None, help="folder")
    arguments = parser.parse_args()
    result = {"facts": facts(1), "turns": arguments.turns, "rows": measure(on, arguments.turns)}
    print(table(result))
    if arguments.output:
        write_json(arguments.output / "topk_logprobs.json", result)
        with replacing(arguments.output / "topk_logprobs.md") as temporary:
            temporary.write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
