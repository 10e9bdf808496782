"""Of the search for candidates, and of the choice of the best candidates."""

from rl_kernels.topk_logprobs.triton import BLOCK, KEPT_BLOCK
from rl_kernels.topk_logprobs.triton_kernels import keep_kernel, search_kernel


def _specification(function, dtype="bf16", *, state=False, everything=False):
    pointers = {"logits": f"*{dtype}", "bounds": "*i32", "counts": "*i32", "candidates": "*i64", "out": "*i64"}
    pointers |= dict.fromkeys(("inverse", "states"), "*fp32" if state else "*i32")
    pointers |= dict.fromkeys(("kept", "mask"), "*u8" if everything else "*i32")
    constants = {"STATE": state, "CAPPED": everything and state, "KEPT": everything, "MASKED": everything and not state}
    constants |= {"column_stride": 1, "kept_stride": 1} if everything else {"column_stride": 1}
    constants |= {"ROWS": 1, "BLOCK": BLOCK if function is search_kernel else KEPT_BLOCK}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n in pointers or n in ("start", "stop", "row_stride", "kept_row_stride"))
    return function, types, constants, {"aligned": aligned, "warps": 8 if function is search_kernel else 4}


SPECIFICATIONS = {
    "search bf16": _specification(search_kernel),
    "search fp32, kept, masked": _specification(search_kernel, "fp32", everything=True),
    "search with state": _specification(search_kernel, "fp32", state=True),
    "search with state, kept, capped": _specification(search_kernel, "fp32", state=True, everything=True),
    "keep": _specification(keep_kernel),
}
