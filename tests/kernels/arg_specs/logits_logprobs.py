"""Of the two sweeps over whole logits."""

from rl_kernels.logits_logprobs.triton_kernels import backward_kernel, forward_kernel


def _specification(function, dtype, *, everything):
    """The plain kernel, or the one with every option."""
    pointers = {"logits": f"*{dtype}", "gradient": f"*{dtype}", "inv_temperature": "*fp32", "a": "*fp32", "b": "*fp32"}
    pointers |= {"logsumexp": "*fp32", "entropy": "*fp32"}
    pointers |= {"allowed": "*i32", "mask": "*u8"} if everything else {"allowed": "*fp32", "mask": "*fp32"}
    constants = {"CAPPED": everything, "ALLOWED": everything, "MASKED": everything, "BLOCK_N": 4096}
    unit = {"column_stride": 1, "gradient_column_stride": 1}
    names = function.arg_names
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in names if n not in constants | unit}
    aligned = tuple(n for n in types if n in pointers or n in ("row_stride", "gradient_row_stride"))
    return function, types, constants | {n: 1 for n in unit if n in names}, {"aligned": aligned}


SPECIFICATIONS = {
    f"{function.__name__[:-7]} {dtype}{', every option' if everything else ''}": _specification(
        function, dtype, everything=everything
    )
    for function in (forward_kernel, backward_kernel)
    for dtype, everything in (("bf16", False), ("fp32", False), ("bf16", True))
}
