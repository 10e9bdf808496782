"""Of the Gluon kernels: one architecture each."""

from rl_kernels.experimental.gluon import tma
from rl_kernels.experimental.gluon.linear_logprobs import KERNELS, own_constants
from rl_kernels.experimental.gluon.rows import ENTRIES, FEATURES, ROWS
from rl_kernels.experimental.on_chip_forward import GROUP


def _specification(name: str, dtype: str, everything: bool):
    """The plain kernel, or the one with every option."""
    on = KERNELS[name]
    types = dict.fromkeys(("inverse", "states", "targets"), "*fp32") | {"tokens": "*i64", "softcap": "fp32"}
    types |= {"bias": f"*{dtype}", "kept": "*i32"} if everything else {"bias": "*fp32", "kept": "*fp32"}
    constants = dict.fromkeys(("BIASED", "CAPPED", "KEPT"), everything) | {"GROUP": GROUP, "STAGES": on.stages}
    # Features that are no multiple of a tile's, with every option.
    constants |= own_constants(name, FEATURES + everything)
    if on.gathers:
        types |= {"hidden": f"*{dtype}", "weight": f"*{dtype}", "rows": "*i64"}
    else:
        types |= {n: f"tensordesc<{dtype}[{r},{FEATURES}],{tma.LAYOUT!r}>" for n, r in _DESCRIBED}
    types = {n: types.get(n, "i32") for n in on.kernel.arg_names if n not in constants}
    aligned = ("part_size", "hidden_row_stride", "weight_row_stride", *(("features",) if on.gathers else ()))
    aligned = tuple(n for n, kind in types.items() if kind.startswith("*") or n in aligned)
    how = {"matrix": True, "bulk": True, "warps": on.warps, "aligned": aligned, "targets": (name,)}
    return on.kernel, types, constants, how


_DESCRIBED = (("hidden", ROWS), ("weight", ENTRIES))
SPECIFICATIONS = {
    f"forward {dtype}{', every option' if everything else ''} ({name})": _specification(name, dtype, everything)
    for name in KERNELS
    for dtype, everything in (("bf16", False), ("bf16", True), ("fp16", False))
}
