"""Compile the Pallas kernels for GPUs for every architecture, without one: JAX lowers them to Triton's language, and
the Triton that is installed, which is not the one inside XLA, makes machine code of it.

    python kernels/benchmarks/pallas_ahead_of_time.py            # table, and results/pallas_ahead_of_time.json
    python kernels/benchmarks/pallas_ahead_of_time.py --check --only "logits bfloat16" --targets sm_90
"""

import argparse
import os
import platform
import re
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

# It is Triton's compiler that is wanted, and no accelerator of JAX's.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import triton
from ahead_of_time import SHARED, TARGETS, amd, nvidia
from jax import export

# What JAX makes public is bytecode that another version's reader refuses, and text with locations that no parser takes.
from jax._src.pallas.triton import lowering
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from rl_kernels import in_jax

RESULTS = Path(__file__).parent / "results" / "pallas_ahead_of_time.json"
# Rows that are no multiple of a block, and Llama-3's sizes.
N, H, V = 500, 4096, 128256
NAME = re.compile(r"tt\.func public @(\w+)\(")


def modules(operation: str, dtype: str, everything: bool, brand: str) -> list[str]:
    """Triton's language of the kernels of a gradient, forward first."""
    shape = jax.ShapeDtypeStruct
    arrays = (shape((N, V), dtype),) if operation == "logits" else (shape((N, H), dtype), shape((V, H), dtype))
    options: dict[str, Any] = {"softcap": 30.0, "logit_scale": 0.5} if everything else {}
    traced = {}
    if everything:
        traced = {
            "temperature": shape((N,), jnp.float32),
            "allowed_tokens": shape((N, V), bool),
            "mask": shape((N,), bool),
        }
        if operation == "linear":
            traced["bias"] = shape((V,), dtype)

    def loss(arrays, tokens, traced):
        out = getattr(in_jax, f"{operation}_logprobs")(*arrays, tokens, backend="pallas", **options, **traced)
        return jnp.sum(out.logprobs) - 0.1 * jnp.sum(out.entropy)

    texts = []

    def allowed(*arguments, **options):
        lowered = lower(*arguments, **options)
        texts.append(lowered.module.operation.get_asm(enable_debug_info=False))
        return lowered

    lower, backend = lowering.lower_jaxpr_to_triton_module, jax.default_backend
    lowering.lower_jaxpr_to_triton_module, jax.default_backend = allowed, lambda: "gpu"
    device = AbstractDevice("NVIDIA H200" if brand == "cuda" else "gfx942", None, "gpu")
    try:
        with warnings.catch_warnings(), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            checks = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
            exported = export.export(jax.jit(jax.grad(loss)), platforms=[brand], disabled_checks=checks)
            exported(arrays, shape((N,), jnp.int32), traced)
    finally:
        lowering.lower_jaxpr_to_triton_module, jax.default_backend = lower, backend
    return texts


def compiled(text: str, target: str) -> dict[str, Any]:
    """Registers, spills, shared memory and instructions of one kernel, with the launch parameters JAX gives it."""
    brand = TARGETS[target].backend
    # As pallas_call has it where a kernel asks for no number of stages.
    options = {"num_warps": 8, "num_stages": 3 if brand == "cuda" else 1}
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(text)
        file.flush()
        result = triton.compile(file.name, target=TARGETS[target], options=options)
    return {"shared": result.metadata.shared} | (nvidia if brand == "cuda" else amd)(result.asm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", help="operation, data type and options that begin with this")
    parser.add_argument("--targets", default=",".join(TARGETS))
    arguments = parser.parse_args()
    rows, wrong = [], []
    cases = [(o, d, e) for o in ("logits", "linear") for d in ("bfloat16", "float32") for e in (False, True)]
    for operation, dtype, everything in cases:
        case = f"{operation} {dtype}, {'every option' if everything else 'plain'}"
        if not case.startswith(arguments.only):
            continue
        texts = {}
        for target in arguments.targets.split(","):
            brand = "cuda" if target.startswith("sm_") else "rocm"
            texts[brand] = texts.get(brand) or modules(operation, dtype, everything, brand)
            for text in texts[brand]:
                name = NAME.findall(text)[0]
                row = {"case": case, "kernel": name, "target": target, **compiled(text, target)}
                rows.append(row)
                print(*row.values(), sep=" | ", flush=True)
                if row["shared"] > SHARED[target]:
                    wrong.append(f"{case}, {name} on {target}: {row['shared']} bytes of shared memory")
                if name == "linear_logprobs_forward" and dtype == "bfloat16" and not row["matrix"]:
                    wrong.append(f"{case}, {name} on {target}: no matrix instruction")
    if not arguments.check:
        from rl_bridge.common.files import write_json

        versions = {name: version(name) for name in ("jax", "triton")} | {"python": platform.python_version()}
        write_json(RESULTS, {"versions": versions, "compiled": rows})
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
