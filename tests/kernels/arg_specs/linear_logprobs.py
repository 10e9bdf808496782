"""Of the two passes over a block of logits: the row states, and the gradient of the logits."""

from rl_kernels.linear_logprobs.triton import BLOCK_N, state_block
from rl_kernels.linear_logprobs.triton_kernels import dlogits_kernel, state_kernel


def _specification(function, dtype: str, everything: bool, **options):
    """The plain kernel, or the one with every option."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    numbers = ("logits", "inv_temperature", "maximum", "total", "weighted", "targets", "own", "a", "b", "base")
    pointers = dict.fromkeys(numbers, f"*{wide}") | {"tokens": "*i64", "gradient": f"*{dtype}"}
    pointers |= {"bias": f"*{dtype}", "allowed": "*u8"} if everything else {"bias": "*fp32", "allowed": "*fp32"}
    block = BLOCK_N if function is dlogits_kernel else state_block(8 if dtype == "fp64" else 4)
    constants = dict.fromkeys(("BIASED", "CAPPED", "ALLOWED"), everything) | {"BLOCK_N": block}
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n in pointers or n in ("row_stride", "gradient_row_stride", "vocab"))
    return function, types, constants, {"aligned": aligned} | options


# With the bytes that a thread loads and stores in one instruction. A program of `dlogits_kernel` has 1024 logits: four
# for each of NVIDIA's 256 threads, two for each of AMD's 512.
_NVIDIA, _AMD = ("sm_80", "sm_90", "sm_100"), ("gfx90a", "gfx942", "gfx950")


def _dlogits(dtype: str, everything: bool, targets: tuple[str, ...], logits: int):
    widths = {"load": 4 * logits, "store": logits * (2 if dtype == "bf16" else 4)}
    return _specification(dlogits_kernel, dtype, everything, targets=targets, **widths)


SPECIFICATIONS = {
    f"state {dtype}{', every option' if everything else ''}": _specification(state_kernel, dtype, everything, load=16)
    for dtype, everything in (("fp32", False), ("bf16", True), ("fp64", True))
} | {
    f"dlogits {dtype}{', every option' if everything else ''} ({brand})": _dlogits(dtype, everything, targets, logits)
    for dtype, everything in (("bf16", False), ("fp32", True))
    for brand, targets, logits in (("NVIDIA", _NVIDIA, 4), ("AMD", _AMD, 2))
}
