"""What interop costs: PPO's loss from rl_fn through from_jax against the same loss written by hand in torch.

python experiments/benchmarks/from_jax_ppo.py    # or: make benchmark-bridge

64 × 4096 tokens, forward and backward, eager and under torch.compile. The two versions take turns in one process; the
ratio is of the medians. The cost of a new shape is a first call on sizes never seen, less a second call on them.
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import rl_fn
from rl_bridge.common.files import replacing, write_json
from rl_bridge.functional import from_jax

Tensors = Sequence[torch.Tensor]
RESULTS = Path(__file__).parents[1] / "results" / "from_jax_ppo"
CLIP_LOW, CLIP_HIGH, VALUE_CLIP, VALUE_COEF = 0.2, 0.28, 0.5, 0.1


def by_rl_fn(logprobs: Any, values: Any, old_logprobs: Any, old_values: Any, advantages: Any, returns: Any, mask: Any):
    """The loss of an update of PPO: clipped policy loss and clipped value loss, token mean."""
    policy = rl_fn.ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    value = rl_fn.value_clip(values, old_values, returns, mask, clip=VALUE_CLIP)
    return rl_fn.aggregate(policy, mask, "token-mean") + VALUE_COEF * rl_fn.aggregate(value, mask, "token-mean")


def by_hand(
    logprobs: torch.Tensor,
    values: torch.Tensor,
    old_logprobs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    guard: bool = True,
) -> torch.Tensor:
    """The same as trainers write it; `guard` holds log-ratios within ±20 and keeps masked NaNs out, as verl does."""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio.clamp(-20.0, 20.0) if guard else log_ratio)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    policy = -torch.min(ratio * advantages, clipped * advantages)
    near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    value = torch.max((values - returns).square(), (near - returns).square())
    count = mask.sum()
    policy, value = (torch.where(mask, x, 0.0) if guard else x * mask for x in (policy, value))
    return policy.sum() / count + VALUE_COEF * value.sum() / count


def bare(*tensors: torch.Tensor) -> torch.Tensor:
    """The shortest form: infinite where a log-ratio overflows, NaN where a masked entry is."""
    return by_hand(*tensors, guard=False)


def arguments(rows: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Random rollouts with right padding; log-probabilities near the old ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, length, generator=generator)

    old_logprobs, old_values = -normal(1.5).abs(), normal(1.0)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return [
        (old_logprobs + normal(0.2)).requires_grad_(),
        (old_values + normal(0.5)).requires_grad_(),
        old_logprobs,
        old_values,
        normal(1.0),
        normal(1.0),
        torch.arange(length) < lengths,
    ]


def step(loss: Callable[..., torch.Tensor], tensors: Tensors) -> list[torch.Tensor]:
    """Forward and backward."""
    value = loss(*tensors)
    return [value.detach(), *torch.autograd.grad(value, tensors[:2])]


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(versions: dict[str, Callable[..., Any]], tensors: Tensors, repeats: int) -> dict[str, float]:
    """Medians of calls that take turns, and ratios to them; equal results are a condition."""
    results = [step(loss, tensors) for loss in versions.values()]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in tqdm(range(-3, repeats), leave=False):
        for name in sorted(versions, reverse=turn % 2 == 0):
            took = seconds(lambda: step(versions[name], tensors))  # noqa: B023
            if turn >= 0:
                times[name].append(took)
    medians = {name: statistics.median(x) for name, x in times.items()}
    ratios = {f"from_jax / {name}": medians["from_jax"] / medians[name] for name in versions if name != "from_jax"}
    return {f"{name} (ms)": 1e3 * x for name, x in medians.items()} | ratios


def new_shapes(loss: Callable[..., Any], count: int) -> dict[str, float]:
    """What a shape costs that was never seen: the first call less the second, over many shapes."""
    costs = []
    for i in range(count):
        tensors = arguments(3 + i, 101 + 7 * i)
        first = seconds(lambda: step(loss, tensors))  # noqa: B023
        costs.append(first - seconds(lambda: step(loss, tensors)))  # noqa: B023
    return {"median_ms": 1e3 * statistics.median(costs), "max_ms": 1e3 * max(costs)}


def hardware() -> str:
    """The processor's name and the threads that torch used."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    name = lines[0].split(":")[1].strip() if lines else platform.processor()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores, {device}"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    columns = list(result["eager"])
    rows = [[mode, *(f"{result[mode][column]:.2f}" for column in columns)] for mode in ("eager", "compile")]
    shape = result["new_shape"]
    lines = [
        f"# from_jax on PPO's loss, {result['rows']} × {result['length']} tokens, forward and backward",
        "",
        f"{result['date']}, {result['hardware']}, {versions}; `{result['command']}`",
        "",
        f"| mode | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"First call of all (trace and lowering): {result['first_trace_ms']:.0f} ms. A new shape: "
        f"{shape['median_ms']:.2f} ms (median), {shape['max_ms']:.2f} ms (worst of {result['shapes']}).",
        "",
        "`by hand` holds log-ratios within ±20 and keeps masked NaNs out with `where`; `bare` does neither. from_jax",
        "is finite with the right gradient at any log-ratio, and keeps masked NaNs out of all its arguments.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="from_jax against hand-written torch on PPO's loss")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    ours = from_jax(by_rl_fn)
    small = arguments(2, 50)
    first = seconds(lambda: step(ours, small))
    result: dict[str, Any] = {"rows": options.rows, "length": options.length, "repeats": options.repeats}
    result |= {"first_trace_ms": 1e3 * first, "shapes": options.shapes, "new_shape": new_shapes(ours, options.shapes)}
    tensors = arguments(options.rows, options.length)
    versions: dict[str, Callable[..., Any]] = {"from_jax": ours, "by hand": by_hand, "bare": bare}
    result["eager"] = compare(versions, tensors, options.repeats)
    compiled = {name: torch.compile(loss, fullgraph=True) for name, loss in versions.items()}
    result["compile"] = compare(compiled, tensors, options.repeats)
    result |= {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": {name: version(name) for name in ("torch", "jax", "rl-fn")} | {"python": platform.python_version()},
        "command": "python experiments/benchmarks/from_jax_ppo.py",
    }
    write_json(options.output / "result.json", result)
    with replacing(options.output / "table.md") as temporary:
        temporary.write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
