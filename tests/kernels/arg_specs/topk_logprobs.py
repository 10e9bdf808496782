"""Of the search for candidates, and of the choice of the best candidates."""

from rl_kernels.topk_logprobs.triton import BLOCK_N, CANDIDATE_BLOCK
from rl_kernels.topk_logprobs.triton_kernels import keep_kernel, search_kernel


def _specification(function, dtype="bf16", *, state=False, everything=False):
    pointers = {"logits": f"*{dtype}", "bounds": "*i32", "counts": "*i32", "candidates": "*i64", "out": "*i64"}
    pointers |= dict.fromkeys(("inv_temperature", "states"), "*fp32" if state else "*i32")
    pointers |= dict.fromkeys(("allowed", "mask"), "*u8" if everything else "*i32")
    constants = {
        "STATE": state,
        "CAPPED": everything and state,
        "ALLOWED": everything,
        "MASKED": everything and not state,
    }
    constants |= {"column_stride": 1, "allowed_stride": 1} if everything else {"column_stride": 1}
    constants |= {"BLOCK_M": 1, "BLOCK_N": BLOCK_N if function is search_kernel else CANDIDATE_BLOCK}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n in pointers or n in ("start", "stop", "row_stride", "allowed_row_stride"))
    return function, types, constants, {"aligned": aligned, "warps": 8 if function is search_kernel else 4}


SPECIFICATIONS = {
    "search bf16": _specification(search_kernel),
    "search fp32, kept, masked": _specification(search_kernel, "fp32", everything=True),
    "search with state": _specification(search_kernel, "fp32", state=True),
    "search with state, kept, capped": _specification(search_kernel, "fp32", state=True, everything=True),
    "keep": _specification(keep_kernel),
}
