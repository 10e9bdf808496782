"""A model's weights to int8 and fp8: ours in a few launches against a loop over tensors.

    python kernels/benchmarks/quantize.py                    # on a GPU: JSON and table in results/
    python kernels/benchmarks/quantize.py --output FOLDER    # on a CPU: the torch backend on a small model

bfloat16 weights in the shapes of Llama-3-8B's layers, random; bytes are those of weights and codes once. The peers have
conventions of their own: how many of their codes are ours is in the table. On a CPU it only shows that the script runs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, device, facts
from timing import compare, versions

from rl_bridge.common.files import replacing, write_json
from rl_kernels import quantize_

# Scheme, granularity, dtype of the codes.
SCHEMES = {
    "int8 channel": ("int8", "channel", torch.int8),
    "int8 tensor": ("int8", "tensor", torch.int8),
    "fp8 channel": ("fp8", "channel", torch.float8_e4m3fn),
    "fp8 block": ("fp8", "block", torch.float8_e4m3fn),
}
Way = Callable[..., None]


def model(on: torch.device) -> list[torch.Tensor]:
    big = on.type == "cuda"
    hidden, heads, wide, layers = (4096, 1024, 14336, 32) if big else (256, 128, 768, 2)
    shapes = [(hidden, hidden), (heads, hidden), (heads, hidden), (hidden, hidden)]
    shapes += [(wide, hidden), (wide, hidden), (hidden, wide)]
    g = torch.Generator(on).manual_seed(0)
    return [
        torch.randn(shape, device=on, dtype=torch.bfloat16, generator=g).mul_(0.02)
        for _ in range(layers)
        for shape in shapes
    ]


def scale_shape(weight: torch.Tensor, granularity: str) -> tuple[int, ...]:
    rows, columns = weight.shape
    return {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[granularity]


def ours(backend: str) -> Way:
    def way(weights, out, scales, scheme, granularity):
        quantize_(weights, out, scales, scheme=scheme, granularity=granularity, backend=backend)

    return way


def _eager(weight: torch.Tensor, scheme: str, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a trainer writes without a kernel, in float32."""
    x = weight.float()
    largest = 127.5 if scheme == "int8" else 448.0
    if granularity == "block":
        blocks = x.view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / largest
        codes = (blocks / scale[:, None, :, None]).view(x.shape)
    else:
        scale = (x.abs().amax(-1, keepdim=True) if granularity == "channel" else x.abs().amax().view(1, 1)) / largest
        codes = x / scale
    if scheme == "int8":
        return codes.clamp(-128, 127).round().to(torch.int8), scale
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def loop(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Way:
    def way(weights, out, scales, scheme, granularity):
        for weight, codes, scale in zip(weights, out, scales, strict=True):
            found, factor = function(weight, scheme, granularity)
            codes.copy_(found)
            scale.copy_(factor.view(scale.shape))

    return way


def _vllm(weight: torch.Tensor, scheme: str, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm import _custom_ops

    if scheme == "int8" and granularity == "channel":
        found = _custom_ops.scaled_int8_quant(weight)
    elif scheme == "fp8" and granularity != "block":
        found = _custom_ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=granularity == "channel")
    else:
        raise ImportError(f"vLLM has no operation for {scheme} {granularity}")
    return found[0], found[1]


def ways(on: torch.device) -> dict[str, Way]:
    found = {"ours, Triton": ours("triton")} if on.type == "cuda" else {}
    found |= {"ours, torch": ours("torch"), "eager, a tensor at a time": loop(_eager)}
    if on.type == "cuda":
        found["compiled, a tensor at a time"] = loop(torch.compile(_eager, dynamic=False))
    return found | {"vLLM, a tensor at a time": loop(_vllm)}


def measure(on: torch.device, turns: int) -> list[dict[str, Any]]:
    weights = model(on)
    elements = sum(w.numel() for w in weights)
    rows: list[dict[str, Any]] = []
    for label, (scheme, granularity, dtype) in SCHEMES.items():
        exact = [torch.empty(w.shape, dtype=dtype, device=on) for w in weights]
        scales = [torch.empty(scale_shape(w, granularity), device=on) for w in weights]
        quantize_(weights, exact, scales, scheme=scheme, granularity=granularity, backend="torch")
        out = [torch.empty_like(codes) for codes in exact]
        calls = {
            name: [lambda way=way, o=out, s=scales, a=(scheme, granularity): way(weights, o, s, *a)]
            for name, way in ways(on).items()
        }
        for name, result in compare(calls, on, turns).items():
            if "seconds" in result:
                calls[name][0]()
                same = sum(
                    (a.view(torch.uint8) == b.view(torch.uint8)).sum().item() for a, b in zip(out, exact, strict=True)
                )
                result |= {"same": same / elements, "gbs": 3 * elements / result["seconds"] / 1e9}
                if name.startswith("ours") and same != elements:
                    raise AssertionError(f"{name}, {label}: {elements - same} of {elements} codes differ")
            rows.append({"scheme": label, "elements": elements, "tensors": len(weights), "way": name, **result})
            print(rows[-1], flush=True)
    return rows


def table(result: dict[str, Any]) -> str:
    info = result["facts"]
    lines = [
        f"{info['hardware']}; {info['date']}; a copy reaches {info['reached']['gbs']:.0f} GB/s; median of "
        f"{result['turns']} turns. " + ", ".join(f"{name} {number}" for name, number in info["versions"].items()) + ".",
        "",
        "| scheme | tensors | elements | way | ms | quartiles | GB/s | launches | codes that are ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        case = f"| {row['scheme']} | {row['tensors']} | {row['elements']} | {row['way']} "
        if "seconds" not in row:
            lines.append(f"{case}| {row['missing'].replace('|', '/')} | | | | |")
            continue
        low, high = (f"{1e3 * q:.2f}" for q in row["quartiles"])
        number = "not measured" if row["launches"] is None else row["launches"]
        lines.append(
            f"{case}| {1e3 * row['seconds']:.2f} | {low} … {high} | {row['gbs']:.1f} | {number} | {row['same']:.6f} |"
        )
    if info["threads"]:
        lines += [
            "",
            "On a CPU, in seconds of its time: the Triton kernels, launches and a real model are not measured.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on = device()
    parser.add_argument("--turns", type=int, default=10 if on.type == "cuda" else 3)
    parser.add_argument("--output", type=Path, default=RESULTS if on.type == "cuda" else None, help="folder")
    arguments = parser.parse_args()
    info = facts(1)
    info["versions"] |= versions("vllm")
    result = {"facts": info, "turns": arguments.turns, "rows": measure(on, arguments.turns)}
    print(table(result))
    if arguments.output:
        write_json(arguments.output / "quantize.json", result)
        with replacing(arguments.output / "quantize.md") as temporary:
            temporary.write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
