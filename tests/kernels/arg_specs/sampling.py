"""Of the sampler's four launches."""

from rl_kernels.sampling.triton_kernels import cutoff_kernel, draw_kernel, tiles_kernel


def _specification(function, dtype, **constants):
    integers = {"rows", "vocab_size", "tiles", "row_stride"}
    longs = {"cutoff", "last", "k", "seed", "position", "token", "number"}
    constants = {"BLOCK_M": 1, "BLOCK_N": 1024, "TILES": 128, **constants}
    constants = {n: v for n, v in constants.items() if n in function.arg_names} | {"column_stride": 1}
    special = (
        {"logits": f"*{dtype}", "allowed_count": "*i32"} | dict.fromkeys(longs, "*i64") | dict.fromkeys(integers, "i32")
    )
    types = {n: special.get(n, "*fp32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n not in integers or n == "row_stride")
    return function, types, constants, {"aligned": aligned, "warps": 4}


SPECIFICATIONS = {
    **{
        f"tiles {dtype}{', kept' if cut else ''}": _specification(tiles_kernel, dtype, CUT=cut)
        for dtype in ("bf16", "fp32")
        for cut in (False, True)
    },
    **{
        f"{function.__name__[:-7]} {dtype}": _specification(function, dtype)
        for function in (cutoff_kernel, draw_kernel)
        for dtype in ("bf16", "fp32")
    },
}
