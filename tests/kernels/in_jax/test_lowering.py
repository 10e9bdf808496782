"""Pallas's compilers accept the kernels of every device, at Llama-3's sizes, without one: Mosaic for TPU, and for CUDA
and ROCm the dialect for Triton.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from rl_kernels import in_jax

N, H, V = 512, 4096, 128256
TRITON = "__gpu$xla.gpu.triton"
each_operation = pytest.mark.parametrize("operation", ["logits", "linear"])
each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def module(operation, platform, dtype, *, backward=True, traced=None, **options):
    """What is handed to XLA, of a loss on log-probability and entropy of two tokens a row, or of its gradient."""
    shape = jax.ShapeDtypeStruct
    arrays = (shape((N, V), dtype),) if operation == "logits" else (shape((N, H), dtype), shape((V, H), dtype))

    def loss(arrays, tokens, traced):
        out = getattr(in_jax, f"{operation}_logprobs")(*arrays, tokens, **options, **traced)
        return jnp.sum(out.logprobs) - 0.1 * jnp.sum(out.entropy)

    function = jax.jit(jax.grad(loss) if backward else loss)
    checks = [export.DisabledSafetyCheck.custom_call(TRITON)]
    # From JAX 0.11 on the lowering asks which GPU.
    kinds = {"cuda": "NVIDIA H200", "rocm": "gfx942"}
    device = AbstractDevice(kinds[platform], None, "gpu") if platform in kinds else None
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = export.export(function, platforms=[platform], disabled_checks=checks)
        return exported(arrays, shape((N, 2), jnp.int32), traced or {}).mlir_module()


@each_operation
@each_dtype
@pytest.mark.parametrize("backward", [False, True])
def test_for_tpu(monkeypatch, operation, backward, dtype):
    # Traced as on a TPU: the kernels themselves, not their interpretation.
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: "tpu")
    rows = {"mask": jax.ShapeDtypeStruct((N,), jnp.bool_)}
    text = module(operation, "tpu", dtype, backward=backward, traced=rows, softcap=30.0, logit_scale=0.5)
    kernels = {("logits", False): 1, ("logits", True): 2, ("linear", False): 1, ("linear", True): 3}
    assert text.count("tpu_custom_call") >= kernels[operation, backward]


# JAX 0.11 says that it will give this dialect up.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@each_operation
@each_dtype
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_for_gpus(monkeypatch, operation, platform, dtype):
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: "gpu")
    shape = jax.ShapeDtypeStruct
    everything = {
        "temperature": shape((N,), jnp.float32),
        "allowed_tokens": shape((N, V), jnp.bool_),
        "mask": shape((N,), jnp.bool_),
    }
    if operation == "linear":
        everything["bias"] = shape((V,), dtype)
    forward, backward = f'name = "{operation}_logprobs_forward"', 'name = "logits_logprobs_backward"'
    text = module(operation, platform, dtype, backward=False, backend="pallas")
    assert (text.count(f"@{TRITON}("), text.count(forward)) == (1, 1)
    text = module(operation, platform, dtype, traced=everything, softcap=30.0, logit_scale=0.5, backend="pallas")
    assert (text.count(f"@{TRITON}("), text.count(forward), text.count(backward)) == (2, 1, 1)


def test_without_being_asked_a_gpu_has_no_kernel(monkeypatch):
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: "gpu")
    assert TRITON not in module("logits", "cuda", jnp.bfloat16)
