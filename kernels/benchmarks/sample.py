"""A token a row from logits: ours against softmax and multinomial, sorting, FlashInfer and vLLM.

    python kernels/benchmarks/sample.py                      # on a GPU: JSON and table in results/
    python kernels/benchmarks/sample.py --output FOLDER      # on a CPU: the torch backend at small sizes

Two modes: temperature alone, and top-k 50 with top-p 0.95 besides. Ours returns the log-probability under what was
drawn from, too; the ways in PyTorch compute it with a gather; FlashInfer and vLLM return ids alone. Logits are
synthetic: a row falls off with the logarithm of the rank as a language model's do, its ids permuted. Calls go round
inputs of 256 MiB together, so that caches do not hold them. On a CPU it only shows that the script runs.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, device, facts
from timing import compare, versions

from rl_bridge.common.files import replacing, write_json
from rl_kernels import sample

HEAT, TOP_K, TOP_P = 0.8, 50, 0.95
MODES = ("temperature", "truncated")


def logits_like_a_models(rows: int, vocabulary: int, dtype: torch.dtype, on: torch.device, seed: int) -> torch.Tensor:
    g = torch.Generator(on).manual_seed(seed)
    rank = torch.rand(rows, vocabulary, device=on, generator=g).argsort(-1) + 1
    noise = torch.randn(rows, vocabulary, device=on, generator=g)
    return (18.0 - 2.0 * rank.log() + 0.5 * noise).to(dtype)


def ours(logits: torch.Tensor, mode: str, backend: str | None) -> torch.Tensor:
    more: dict[str, Any] = {"top_k": TOP_K, "top_p": TOP_P} if mode == "truncated" else {}
    return sample(logits, temperature=HEAT, **more, seed=0, position=0, check=False, backend=backend).tokens


def torch_multinomial(logits: torch.Tensor, mode: str) -> torch.Tensor:
    """Truncated by a sort, as samplers without kernels do."""
    x = logits.float() / HEAT
    if mode == "truncated":
        value, index = x.sort(-1, descending=True)
        value[:, TOP_K:] = float("-inf")
        p = torch.softmax(value, -1)
        value[p.cumsum(-1) - p >= TOP_P] = float("-inf")
        x = torch.empty_like(x).scatter_(-1, index, value)
    log_p = torch.log_softmax(x, -1)
    tokens = torch.multinomial(log_p.exp(), 1)
    log_p.gather(-1, tokens)
    return tokens[:, 0]


def flashinfer(logits: torch.Tensor, mode: str) -> torch.Tensor:
    from flashinfer.sampling import sampling_from_logits, top_k_top_p_sampling_from_logits

    x = logits.float() / HEAT
    return top_k_top_p_sampling_from_logits(x, TOP_K, TOP_P) if mode == "truncated" else sampling_from_logits(x)


def vllm(logits: torch.Tensor, mode: str) -> torch.Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    x = logits.float() / HEAT
    if mode == "truncated":
        k = torch.full((len(x),), TOP_K, device=x.device)
        x = apply_top_k_top_p(x, k, torch.full((len(x),), TOP_P, device=x.device))
    return random_sample(torch.softmax(x, -1), {})


def ways(on: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if on.type == "cuda":
        found["ours, Triton"] = lambda logits, mode: ours(logits, mode, "triton")
    found["ours, torch"] = lambda logits, mode: ours(logits, mode, "torch")
    found["torch multinomial"] = torch_multinomial
    if on.type == "cuda":
        found["torch multinomial, compiled"] = torch.compile(torch_multinomial, dynamic=False)
    return found | {"FlashInfer": flashinfer, "vLLM": vllm}


def outside(tokens: torch.Tensor, logits: torch.Tensor, mode: str) -> float:
    """Share of tokens that the truncation does not keep."""
    if mode == "temperature":
        return 0.0
    allowed = sample(
        logits, temperature=HEAT, top_k=TOP_K, top_p=TOP_P, seed=0, position=0, return_allowed_tokens=True
    ).allowed_tokens
    assert allowed is not None
    return 1.0 - (allowed == tokens[:, None]).any(-1).double().mean().item()


def measure(on: torch.device, turns: int) -> list[dict[str, Any]]:
    big = on.type == "cuda"
    rows: list[dict[str, Any]] = []
    for vocabulary in (128256, 152064) if big else (4096,):
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (64, 128, 256, 1024) if big else (2, 8):
                size = batch * vocabulary * dtype.itemsize
                copies = max(1, min(20, (256 << 20) // size)) if big else 1
                inputs = [logits_like_a_models(batch, vocabulary, dtype, on, seed) for seed in range(copies)]
                for mode in MODES:
                    calls = {
                        name: [lambda x=x, way=way, mode=mode: way(x, mode) for x in inputs]
                        for name, way in ways(on).items()
                    }
                    for name, result in compare(calls, on, turns).items():
                        if "seconds" in result:
                            result["outside"] = outside(calls[name][0](), inputs[0], mode)
                            result["gbs"] = size / result["seconds"] / 1e9
                        case = {"batch": batch, "vocabulary": vocabulary, "dtype": str(dtype)[6:], "mode": mode}
                        rows.append({**case, "way": name, **result})
                        print(rows[-1], flush=True)
    return rows


def table(result: dict[str, Any]) -> str:
    info = result["facts"]
    lines = [
        f"{info['hardware']}; {info['date']}; a copy reaches {info['reached']['gbs']:.0f} GB/s; median of "
        f"{result['turns']} turns. " + ", ".join(f"{name} {number}" for name, number in info["versions"].items()) + ".",
        "",
        "| B | V | dtype | mode | way | µs | quartiles | launches | GB/s, logits once | outside the kept set |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        case = f"| {row['batch']} | {row['vocabulary']} | {row['dtype']} | {row['mode']} | {row['way']} "
        if "seconds" not in row:
            lines.append(f"{case}| {row['missing'].replace('|', '/')} | | | | |")
            continue
        low, high = (f"{1e6 * q:.1f}" for q in row["quartiles"])
        number = "not measured" if row["launches"] is None else row["launches"]
        rate = f"{row['gbs']:.0f} | {row['outside']:.4f}"
        lines.append(f"{case}| {1e6 * row['seconds']:.1f} | {low} … {high} | {number} | {rate} |")
    if info["threads"]:
        lines += [
            "",
            "On a CPU, in seconds of its time: the Triton kernels, launches and the real sizes are not measured.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on = device()
    parser.add_argument("--turns", type=int, default=20 if on.type == "cuda" else 3)
    parser.add_argument("--output", type=Path, default=RESULTS if on.type == "cuda" else None, help="folder")
    arguments = parser.parse_args()
    info = facts(1)
    info["versions"] |= versions("flashinfer-python", "vllm")
    result = {"facts": info, "turns": arguments.turns, "rows": measure(on, arguments.turns)}
    print(table(result))
    if arguments.output:
        write_json(arguments.output / "sample.json", result)
        with replacing(arguments.output / "sample.md") as temporary:
            temporary.write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
