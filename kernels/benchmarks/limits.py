"""What the hardware allows: floating-point operations and bytes of the head, and what this machine reaches of either.

python kernels/benchmarks/limits.py                              # measured here
python kernels/benchmarks/limits.py --tflops 790 --gbs 4300      # for a machine that is not at hand
"""

import argparse
import time
from dataclasses import dataclass

import torch

from rl_kernels.common.blocks import Cost, blocks
from rl_kernels.linear_policy_loss.fused import sizes

# Hidden size and vocabulary of the models that the GPU benchmarks run.
MODELS = {"Llama-3-8B": (4096, 128256), "Qwen2.5-7B": (3584, 152064)}


@dataclass(frozen=True)
class Head:
    """N rows of hidden size H against a vocabulary of V, ``width`` bytes a number."""

    rows: int
    hidden_size: int
    vocabulary: int
    width: int = 2

    def flops(self, products: int) -> float:
        """Of so many matrix products: 1 forward; 4 with a backward that computes the logits again, 3 without."""
        return 2.0 * products * self.rows * self.hidden_size * self.vocabulary

    def logits(self) -> int:
        """Bytes of all logits."""
        return self.width * self.rows * self.vocabulary

    def gradients(self) -> int:
        """Bytes of dL/dhidden and dL/dweight, which any way needs."""
        return self.width * self.hidden_size * (self.rows + self.vocabulary)


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
    for name, (hidden_size, vocabulary) in MODELS.items():
        for rows in (8192, *(512 * group for group in (64, 128, 256))):
            head = Head(rows, hidden_size, vocabulary)
            products = [f"{1e3 * head.flops(count) / tflops / 1e12:.1f}" for count in (1, 4, 3)]
            passes = [f"{1e3 * count * head.logits() / gbs / 1e9:.2f}" for count in (1, 2)]
            cells = [name, str(rows), f"{head.logits() / 2**30:.1f}", *products, *passes]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def blocks_table(tflops: float, gbs: float) -> str:
    """What a workspace holds of a model in bfloat16 on a GPU, and what its blocks' gradients cost, as Markdown."""
    # A float32 logit and its narrower gradient; an entry of a hidden state copied and its float32 sum; sums in place.
    training = Cost(6, 6, 0)
    lines = [
        "| model | workspace (MiB) | tokens x vocab | gradients read and written again, of three matmuls' time |",
        "|---|---|---|---|",
    ]
    for name, (hidden_size, vocabulary) in MODELS.items():
        forward = blocks(vocabulary, hidden_size, 64 << 20, Cost(4, 2, 0))
        lines.append(f"| {name} | 64, forward | {forward.tokens} x {forward.vocab} | none is written |")
        cuts = [(f"{mib}", blocks(vocabulary, hidden_size, mib << 20, training)) for mib in (256, 512, 1024)]
        cuts += [(f"{mib}, fused", sizes(vocabulary, hidden_size, mib << 20, 4)) for mib in (1024, 4096)]
        for workspace, (tokens, vocab) in cuts:
            # Each block of tokens passes over dL/dweight, each tile of the vocabulary over dL/dhidden, in float32.
            share = 8 * (1 / tokens + 1 / vocab) / gbs / 1e9 * tflops * 1e12 / 6
            lines.append(f"| {name} | {workspace} | {tokens} x {vocab} | {100 * share:.1f} % |")
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
    print(table(**found), blocks_table(**found), sep="\n\n")


if __name__ == "__main__":
    main()
