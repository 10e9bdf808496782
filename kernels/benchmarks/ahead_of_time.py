"""Compile every Triton and Gluon kernel for every architecture it is for, without a GPU: registers, spills, shared
memory, instructions.

    python kernels/benchmarks/ahead_of_time.py            # table, and results/ahead_of_time.json beside this file
    python kernels/benchmarks/ahead_of_time.py --check    # exit 1 if a kernel spills, or lacks what it should have

A kernel whose Triton IR the committed table has already, for the same target, options and release of Triton, is not
compiled again, but with --again. A changed comment or name does not change the IR.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
if __name__ == "__main__":  # not where a doctest collector imports this file: Triton decides at its own import
    os.environ["TRITON_INTERPRET"] = "0"
    # Triton 3.9 warns where the choice is left open; results must not depend on the version.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.arg_specs import specifications

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Bytes of shared memory a block may have.
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
RESULTS = Path(__file__).parent / "results" / "ahead_of_time.json"


@dataclass(frozen=True)
class Kernel:
    """One specialisation: argument types by name, constants, and what its machine code must contain."""

    name: str
    module: str
    function: str
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 8
    stages: int = 3
    matrix: bool = False
    """Whether matrix instructions are expected."""
    targets: tuple[str, ...] = tuple(TARGETS)
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are multiples of 16, pointers included."""
    bulk: bool = False
    """Whether copies into shared memory that pass through no register (TMA; AMD's to the LDS) are expected."""
    load: int = 0
    """Bytes that a thread must load from global memory in one instruction; 0 where that was not looked at."""
    store: int = 0
    """Likewise stored."""


def kernels() -> list[Kernel]:
    """Every kernel that tests/kernels/arg_specs specifies."""
    return [
        Kernel(name, function.fn.__module__, function.__name__, types, constants, **options)
        for name, function, types, constants, options in specifications()
    ]


def source(kernel: Kernel) -> ASTSource:
    """What Triton compiles: the function with its types and constants."""
    function = getattr(import_module(kernel.module), kernel.function)
    names = function.arg_names
    unknown = set(kernel.types) | set(kernel.constants)
    if unknown != set(names):
        raise ValueError(f"{kernel.name}: arguments {sorted(unknown ^ set(names))} are not those of {kernel.function}")
    return (GluonASTSource if function.is_gluon() else ASTSource)(
        fn=function,
        signature={name: kernel.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned},
    )


def digest(kernel: Kernel, target: str) -> str:
    """Of the first IR that Triton makes of the kernel, without names and places, of the options, and of the release."""
    what, backend = source(kernel), make_backend(TARGETS[target])
    options = backend.parse_options(_options(kernel) | what.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(options), backend.get_module_map()
    module = what.make_ir(TARGETS[target], options, *generators, context)
    text = re.sub(r"@[\w.]+|@\"[^\"]*\"", "@", module.str_nodebug())
    return hashlib.sha256(f"{text} {_options(kernel)} {version('triton')}".encode()).hexdigest()[:16]


def _options(kernel: Kernel) -> dict[str, int]:
    return {"num_warps": kernel.warps, "num_stages": kernel.stages}


def compiled(kernel: Kernel, target: str) -> dict[str, Any]:
    """Compile one kernel for one target and read what came out."""
    result = triton.compile(source(kernel), target=TARGETS[target], options=_options(kernel))
    row = {"kernel": kernel.name, "target": target, "ir": digest(kernel, target), "shared": result.metadata.shared}
    row |= nvidia(result.asm) if target.startswith("sm_") else amd(result.asm)
    return row | {name: widest(result.asm, name) for name in ("load", "store") if getattr(kernel, name)}


def widest(asm: Any, what: str) -> int:
    """Bytes of the widest access to global memory, "load" or "store", of one thread."""
    if "ptx" in asm:
        letters = {"load": "ld", "store": "st"}[what]
        found = re.findall(rf"\b{letters}\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", asm["ptx"])
        return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)
    words = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    found = re.findall(rf"\b(?:global|buffer|flat)_{what}_(\w+)", asm["amdgcn"])
    return max((words.get(word, 0) for word in found), default=0)


def committed(results: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The table's rows by target and digest."""
    rows = json.loads(results.read_text())["compiled"] if results.exists() else []
    return {(row["target"], row["ir"]): row for row in rows}


def nvidia(asm: Any) -> dict[str, Any]:
    """From the cubin, by the tools that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
        sass = subprocess.run([tool, "--dump-sass", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    if found is None:
        raise ValueError(f"no resource usage in {usage.stdout!r}")
    matrix = sorted(set(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA|IMMA|QGMMA|DMMA|IGMMA|UTCIMMA|OMMA)\b", sass)))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    row = {"registers": int(found[1]), "spills": spills, "matrix": matrix}
    bulk = len(re.findall(r"\bUTMALDG\b", sass))
    return row | ({"bulk": bulk} if bulk else {})


def amd(asm: Any) -> dict[str, Any]:
    """From the assembly's metadata."""
    text = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if found is None:
            raise ValueError(f"no {name} in the assembly")
        return int(found[1])

    row = {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "matrix": sorted(set(re.findall(r"\bv_(mfma\w*?)_", text))),
    }
    bulk = len(re.findall(r"\bglobal_load_lds_dwordx4\b|\bbuffer_load_dwordx4\b.*\blds\b", text))
    return row | ({"bulk": bulk} if bulk else {})


def faults(row: dict[str, Any], kernel: Kernel) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    if row["spills"]:
        found.append(f"{row['spills']} spills")
    if row["shared"] > SHARED[row["target"]]:
        found.append(f"{row['shared']} bytes of shared memory, {SHARED[row['target']]} there are")
    if kernel.matrix and not row["matrix"]:
        found.append("no matrix instruction")
    for name in ("load", "store"):
        if row.get(name, 0) < getattr(kernel, name):
            found.append(f"{name}s of {row.get(name, 0)} bytes, {getattr(kernel, name)} expected")
    if kernel.bulk and not row.get("bulk"):
        found.append("no copy into shared memory that passes through no register")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--again", action="store_true", help="compile what the committed table has, too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the table, another for another Triton")
    arguments = parser.parse_args()
    if not arguments.check and (arguments.only or arguments.targets != ",".join(TARGETS)):
        parser.error("the table is written whole: --only and --targets go with --check")
    known = {} if arguments.again else committed(arguments.results)
    rows, wrong = [], []
    for kernel in kernels():
        for target in arguments.targets.split(","):
            if arguments.only in kernel.name and target in kernel.targets:
                row = known.get((target, digest(kernel, target))) or compiled(kernel, target)
                rows.append(row | {"kernel": kernel.name})
                wrong += [f"{kernel.name} on {target}: {fault}" for fault in faults(rows[-1], kernel)]
                print(*rows[-1].values(), sep=" | ", flush=True)
    if not arguments.check:
        from rl_bridge.common.files import write_json

        arguments.results.parent.mkdir(exist_ok=True)
        versions = {"python": platform.python_version(), "triton": version("triton")}
        write_json(
            arguments.results, {"versions": versions, "kernels": [asdict(k) for k in kernels()], "compiled": rows}
        )
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
