"""What the hardware allows: floating-point operations and bytes of the head, and what this machine reaches of either.

python kernels/benchmarks/limits.py                              # measured here
python kernels/benchmarks/limits.py --tflops 790 --gbs 4300      # for a machine that is not at hand
"""

import argparse
import time
from dataclasses import dataclass

import torch

# Hidden size and vocabulary of the models that the GPU benchmarks run.
MODELS = {"Llama-3-8B": (4096, 128256), "Qwen2.5-7B": (3584, 152064)}


@dataclass(frozen=True)
class Head:
    """N rows of hidden size H against a vocabulary of V, ``width`` bytes a number."""

    rows: int
    features: int
    vocabulary: int
    width: int = 2

    def flops(self, products: int) -> float:
        """Of so many matrix products: 1 forward; 4 with a backward that computes the logits again, 3 without."""
        return 2.0 * products * self.rows * self.features * self.vocabulary

    def logits(self) -> int:
        """Bytes of all logits."""
        return self.width * self.rows * self.vocabulary

    def gradients(self) -> int:
        """Bytes of dL/dhidden and dL/dweight, which any way needs."""
        return self.width * self.features * (self.rows + self.vocabulary)


def clock(device: torch.device) -> float:
    """Seconds: on a GPU after everything before has run; on a CPU of its own time, whatever else the machine does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def best(function, device: torch.device, turns: int = 5) -> float:
    """Seconds of the fastest call."""
    function()
    found = []
    for _ in range(turns):
        start = clock(device)
        function()
        found.append(clock(device) - start)
    return min(found)


def reached(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a large square product and GB/s of a copy (read and write), of random numbers."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = best(lambda: a @ b, device)
    source = torch.randn((1 << 30 if device.type == "cuda" else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    copy = best(lambda: target.copy_(source), device)
    return {"tflops": 2.0 * size**3 / product / 1e12, "gbs": 2.0 * 4 * source.numel() / copy / 1e9}


def table(tflops: float, gbs: float) -> str:
    """Least times for the GPU's shapes, as Markdown."""
    lines = [
        f"At {tflops:g} TFLOP/s and {gbs:g} GB/s (bfloat16):\n",
        "| model | N | logits (GiB) | forward (ms) | + backward, logits again (ms) | fused (ms) "
        "| logits read once (ms) | read and written (ms) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (features, vocabulary) in MODELS.items():
        for rows in (8192, *(512 * group for group in (64, 128, 256))):
            head = Head(rows, features, vocabulary)
            products = [f"{1e3 * head.flops(count) / tflops / 1e12:.1f}" for count in (1, 4, 3)]
            passes = [f"{1e3 * count * head.logits() / gbs / 1e9:.2f}" for count in (1, 2)]
            cells = [name, str(rows), f"{head.logits() / 2**30:.1f}", *products, *passes]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, help="of a matrix product; measured without it")
    parser.add_argument("--gbs", type=float, help="GB/s of a copy; measured without it")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"tflops": arguments.tflops, "gbs": arguments.gbs}
    if None in found.values():
        here = reached(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        found = {name: here[name] if value is None else value for name, value in found.items()}
    print(table(**found))


if __name__ == "__main__":
    main()
