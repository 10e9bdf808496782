"""Ring attention against the whole sequence on every rank, and packed documents against padding and a call a document.

python experiments/benchmarks/ring_attention.py    # writes experiments/results/ring_attention/

Forward and backward of one attention layer, float32, one thread a process. The versions take turns; medians. Ranks are
processes of this machine that speak through gloo: the times have the exchange in them, but no network.
"""

import argparse
import datetime
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl_bridge.common.files import replacing, write_json
from rl_bridge.parallel.attention import AttentionPlan
from rl_bridge.parallel.attention.plan import held, rank_plan, segments_of
from rl_bridge.parallel.attention.rectangles import runs_of

RESULTS = Path(__file__).parents[1] / "results" / "ring_attention"
HEADS, KEY_HEADS, DIM = 8, 2, 64
SCALE = DIM**-0.5
DEADLINE = 600.0
Tensors = list[torch.Tensor]


def tensors(tokens: int) -> Tensors:
    """q, k and v, and a gradient of the output: [T, H, D], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def step(
    attention: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: Any
) -> Tensors:
    """Output and gradients."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [N, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True).transpose(1, 2)


def a_call_a_document(lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Attention of packed documents, one after another."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa(*(x[None] for x in part))[0] for part in parts])

    return attention


def by_plan(plan: AttentionPlan) -> Callable[..., torch.Tensor]:
    """Attention of a rank's tokens."""
    return lambda q, k, v: plan.attend(q, k, v, SCALE)


def medians(versions: dict[str, Callable[[], Any]], repeats: int, together: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of calls that take turns. ``together`` lets all ranks begin at once."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(-2, repeats):
        for name, call in versions.items():
            together()
            start = time.perf_counter()
            call()
            together()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def documents(tokens: int, count: int) -> list[int]:
    """Lengths that add up to the tokens, no two alike, in no order."""
    parts = np.random.default_rng(0).dirichlet(np.full(count, 4.0)) if count > 1 else np.ones(1)
    ends = np.maximum(1, np.round(np.cumsum(parts) * tokens)).astype(int)
    return np.diff(ends, prepend=0).tolist()


def ring_against_whole(lengths: list[int], repeats: int) -> dict[str, Any]:
    """What one rank measures: the ring, and every rank computing the whole sequence."""
    group, tokens = dist.group.WORLD, sum(lengths)
    assert group is not None
    segments = segments_of(lengths)
    plan = AttentionPlan(segments, torch.device("cpu"), group)
    own = torch.cat([torch.arange(*span) for span in held(tokens, group.rank(), group.size())])
    whole = tensors(tokens)
    part = [x[own] for x in whole]
    reference, got = step(a_call_a_document(lengths), *whole), step(by_plan(plan), *part)
    errors = [(a[own] - b).abs().max().item() for a, b in zip(reference, got, strict=True)]
    times = medians(
        {
            "whole": lambda: step(a_call_a_document(lengths), *whole),
            "ring": lambda: step(by_plan(plan), *part),
        },
        repeats,
        dist.barrier,
    )
    work = [rank_plan(segments, rank, group.size()).pairs() for rank in range(group.size())]
    received = sum(b - a for exchange in plan.rank_plan.exchanges for a, b in exchange.get)
    return {
        "documents": len(lengths),
        "whole_ms": times["whole"],
        "ring_ms": times["ring"],
        "error": max(errors),
        "largest_share_of_work": max(work) / sum(work),
        "keys_received": received,
    }


def rank(number: int, ranks: int, store: str, arguments: argparse.Namespace, queue: Any) -> None:
    """One process of the ring."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks, timeout=patience)
    for count in arguments.documents:
        row = ring_against_whole(documents(arguments.tokens, count), arguments.repeats)
        if number == 0:
            queue.put(row)
    dist.destroy_process_group()


def ring_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The ring, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = (arguments.ranks, f"file://{folder}/store", arguments, queue)
        processes = [context.Process(target=rank, args=(number, *common)) for number in range(arguments.ranks)]
        for process in processes:
            process.start()
        try:
            rows = [queue.get(timeout=DEADLINE) for _ in arguments.documents]
            for process in processes:
                process.join(DEADLINE)
        finally:
            for process in processes:
                process.kill()
    return rows


def packed_rows(repeats: int, scale: float) -> list[dict[str, Any]]:
    """One process: documents packed, padded to the longest, and one by one."""
    rng = np.random.default_rng(0)
    batches = {
        "768 short": rng.integers(8, 25, 768),
        "128 middling": rng.integers(30, 121, 128),
        "100 log-normal": np.clip(rng.lognormal(4.0, 1.0, 100), 4, 2000).astype(int),
        "6 long": rng.integers(600, 1501, 6),
    }
    rows = []
    for name, drawn in batches.items():
        lengths = sorted(drawn[: max(2, int(scale * len(drawn)))].tolist())
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        packed = tensors(sum(lengths))
        padded = [x.new_zeros(*mask.shape, *x.shape[1:]) for x in packed]
        for x, values in zip(padded, packed, strict=True):
            x[mask] = values
        plan = AttentionPlan(segments_of(lengths), torch.device("cpu"))
        want, got = step(a_call_a_document(lengths), *packed), step(by_plan(plan), *packed)
        times = medians(
            {
                "padded": lambda x=padded: step(sdpa, *x),
                "each": lambda x=packed, y=lengths: step(a_call_a_document(y), *x),
                "packed": lambda x=packed, y=plan: step(by_plan(y), *x),
            },
            repeats,
            lambda: None,
        )
        rows.append(
            {
                "lengths": name,
                "filled": sum(lengths) / mask.numel(),
                **{f"{version}_ms": found for version, found in times.items()},
                "calls": len(runs_of(plan.rank_plan.squares)),
                "error": max((a - b).abs().max().item() for a, b in zip(want, got, strict=True)),
            }
        )
    return rows


def hardware() -> str:
    """The processor's name and its cores."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{lines[0].split(':')[1].strip() if lines else platform.processor()}, {os.cpu_count()} cores"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    ranks, tokens = result["ranks"], result["tokens"]
    lines = [
        f"# Ring attention on {ranks} ranks, {tokens} tokens, and packed documents; forward and backward",
        "",
        f"{result['date']}, {result['hardware']}, torch {result['torch']}; `{result['command']}`",
        "",
        f"{HEADS} heads, {KEY_HEADS} of keys, of {DIM} numbers, float32, one thread a rank, gloo on one machine.",
        "",
        "| documents | every rank the whole (ms) | ring (ms) | ring / whole | largest part of the work"
        " | keys received | largest difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["ring"]:
        cells = [row["documents"], f"{row['whole_ms']:.0f}", f"{row['ring_ms']:.0f}"]
        cells += [f"{row['ring_ms'] / row['whole_ms']:.2f}", f"{row['largest_share_of_work']:.3f}"]
        cells += [f"{row['keys_received']} of {tokens}", f"{row['error']:.0e}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "One process. Padded: SDPA on [N, longest]; each: SDPA document by document; packed: what `Documents` does.",
        "",
        "| lengths | filled | padded (ms) | each (ms) | packed (ms) | calls | largest difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["packed"]:
        cells = [row["lengths"], f"{row['filled']:.2f}"]
        cells += [f"{row[name]:.1f}" for name in ("padded_ms", "each_ms", "packed_ms")]
        cells += [str(row["calls"]), f"{row['error']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of the ring; 2 · ranks divides them")
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the packed documents")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "command": "python experiments/benchmarks/ring_attention.py",
        "ranks": arguments.ranks,
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "ring": ring_rows(arguments),
        "packed": packed_rows(arguments.repeats, arguments.scale),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output / "result.json", result)
    with replacing(arguments.output / "table.md") as path:
        path.write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
