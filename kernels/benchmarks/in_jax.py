"""The JAX operations on a GPU or TPU: time and memory, forward and backward, Pallas against XLA.

    python kernels/benchmarks/in_jax.py            # every case that fits; a table in Markdown
    python kernels/benchmarks/in_jax.py --small    # on a CPU, in the interpreter: that it runs, not how fast

The loss is REINFORCE with an entropy bonus. Memory is what the device's allocator had at its peak beyond the arguments,
gradients included; one process a way, since a peak is a process's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rl_kernels import in_jax

# Hidden size and vocabulary of Llama-3-8B and Qwen2.5-7B.
MODELS = {"llama": (4096, 128256), "qwen": (3584, 152064)}
SMALL = {"model": "small", "operation": "linear", "rows": 32, "hidden_size": 64, "vocabulary": 512}
WAYS = ("log_softmax", "reference", "pallas")


def cases() -> list[dict[str, Any]]:
    return [
        {"model": model, "operation": operation, "rows": rows, "hidden_size": hidden_size, "vocabulary": vocabulary}
        for model, (hidden_size, vocabulary) in MODELS.items()
        for operation in ("logits", "linear")
        for rows in (8192, 32768)
    ]


def whole(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With whole arrays, as everybody writes it."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def loss(arrays: tuple[jax.Array, ...], tokens: jax.Array, way: str) -> jax.Array:
    if way == "log_softmax":
        logits = arrays[0] if len(arrays) == 1 else arrays[0] @ arrays[1].T
        logprobs, entropy = whole(logits, tokens)
    else:
        function: Any = in_jax.logits_logprobs if len(arrays) == 1 else in_jax.linear_logprobs
        logprobs, entropy, _ = function(*arrays, tokens, backend=way)
    return -jnp.mean(logprobs + 0.01 * entropy)


def measured(case: dict[str, Any], way: str, repeats: int) -> dict[str, float]:
    """Median seconds of the forward alone and with the backward, and the peak in bytes where the device counts it."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    a, b, c = jax.random.split(jax.random.key(0), 3)
    rows, hidden_size, vocabulary = case["rows"], case["hidden_size"], case["vocabulary"]
    tokens = jax.random.randint(a, (rows,), 0, vocabulary)

    @partial(jax.jit, static_argnums=(1, 2))
    def drawn(key, shape, scale):
        # In one program, so that no array in float32 is the peak that is measured below.
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    if case["operation"] == "logits":
        arrays = (drawn(b, (rows, vocabulary), 3.0),)
    else:
        arrays = drawn(b, (rows, hidden_size), 1.0), drawn(c, (vocabulary, hidden_size), 3.0 * hidden_size**-0.5)
    value = partial(loss, way=way)

    def seconds(function):
        jax.block_until_ready(function(arrays, tokens))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(function(arrays, tokens))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    jax.block_until_ready(arrays)
    before = sum(x.nbytes for x in arrays)
    found = {"forward": seconds(jax.jit(value)), "both": seconds(jax.jit(jax.value_and_grad(value)))}
    stats = jax.devices()[0].memory_stats() or {}
    return found | ({"extra": stats["peak_bytes_in_use"] - before} if "peak_bytes_in_use" in stats else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(json.loads(arguments.one[0]), arguments.one[1], arguments.repeats)))
        return
    print(
        "| model | operation | rows | way | forward, ms | forward and backward, ms | extra, GiB |\n" + "|---" * 7 + "|"
    )
    for case in [SMALL] if arguments.small else cases():
        for way in WAYS:
            command = [sys.executable, __file__, "--repeats", str(arguments.repeats), "--one", json.dumps(case), way]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                cells = [run.stderr.strip().splitlines()[-1][:80], "", ""]
            else:
                found = json.loads(run.stdout)
                extra = f"{found['extra'] / 2**30:.2f}" if "extra" in found else "not counted"
                cells = [f"{found['forward'] * 1e3:.2f}", f"{found['both'] * 1e3:.2f}", extra]
            print("|", " | ".join([case["model"], case["operation"], str(case["rows"]), way, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
