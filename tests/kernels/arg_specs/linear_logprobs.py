"""Of the two passes over a block of logits: the row states, and the gradient of the logits."""

from rl_kernels.linear_logprobs.triton import BLOCK_N, state_block
from rl_kernels.linear_logprobs.triton_kernels import dlogits_kernel, state_kernel


def _specification(function, dtype: str, everything: bool):
    """The plain kernel, or the one with every option."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    numbers = ("logits", "inv_temperature", "maximum", "total", "weighted", "targets", "own", "a", "b", "base")
    pointers = dict.fromkeys(numbers, f"*{wide}") | {"tokens": "*i64", "gradient": f"*{dtype}"}
    pointers |= {"bias": f"*{dtype}", "allowed": "*u8"} if everything else {"bias": "*fp32", "allowed": "*fp32"}
    block = BLOCK_N if function is dlogits_kernel else state_block(8 if dtype == "fp64" else 4)
    constants = dict.fromkeys(("BIASED", "CAPPED", "ALLOWED"), everything) | {"BLOCK_N": block}
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n in pointers or n in ("row_stride", "gradient_row_stride"))
    return function, types, constants, {"aligned": aligned}


SPECIFICATIONS = {
    f"{function.__name__[:-7]} {dtype}{', every option' if everything else ''}": _specification(
        function, dtype, everything
    )
    for function, dtype, everything in (
        (state_kernel, "fp32", False),
        (state_kernel, "bf16", True),
        (state_kernel, "fp64", True),
        (dlogits_kernel, "bf16", False),
        (dlogits_kernel, "fp32", True),
    )
}
