"""Test-wide switches, set before rl_fn is imported: annotations checked at run time, strict JAX promotion."""

import atexit
import builtins
import ctypes
import functools
import gc
import importlib.util
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides when it is imported whether its kernels run in the interpreter: without a GPU they do.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiling is most of the suite's time: what one worker, test or run has compiled, the others read from disk. The gate
# says where. Where it names no folder, the process that makes one, pytest-xdist's controller, takes it away.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ |= runpy.run_path(str(Path(__file__).parent / ".ci" / "gate.py"))["compiled_programs"]()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="rl-fn-xla-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Code that is not optimised, by XLA's older emitters and in one piece, compiles in a ninth of the time. A law (jit and
# eager agree) and the thorough profile ask for what users get. XLA ends the process at a flag that its version does not
# have, so a process of its own tries them.
if "PYTEST_XDIST_WORKER" not in os.environ and os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
    os.environ["XLA_FLAGS"], without = (
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1 " + os.environ.get("XLA_FLAGS", ""),
        os.environ.get("XLA_FLAGS", ""),
    )
    if subprocess.run([sys.executable, "-c", "import jax; jax.numpy.zeros(1)"], capture_output=True).returncode:
        os.environ["XLA_FLAGS"] = without

import hypothesis
import jax
import jaxtyping
import pytest
from jax._src.interpreters import mlir

# A failing assertion of a helper says what was compared, as those of test files do. A session in a process that has had
# one before finds the helpers imported.
HELPERS = ("tests.support", "tests.bridge", "tests.kernels", "tests.rl_fn", "tests.repository")
pytest.register_assert_rewrite(*(name for name in HELPERS if name not in sys.modules))

jaxtyping.install_import_hook(["rl_fn"], "beartype.beartype")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")

# Lowering a small program takes 25 ms, 10 of them for a new context of MLIR, 4 for the call's lines in each operation.
# A context that serves many programs would keep their constants: after these many a thread gets a new one.
PROGRAMS_OF_A_CONTEXT = 200
in_thread = threading.local()


def context_of_many(make):
    """The thread's context of MLIR. JAX's function is a private one: without that name JAX is left as it is."""
    if getattr(in_thread, "programs", PROGRAMS_OF_A_CONTEXT) == PROGRAMS_OF_A_CONTEXT:
        in_thread.context, in_thread.programs = make(), 0
    in_thread.programs += 1
    return in_thread.context


if PROFILE != "thorough":  # which lowers as a user's process does
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.partial(context_of_many, mlir.make_ir_context)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=400, deadline=None)
hypothesis.settings.load_profile(PROFILE)

# What JAX has compiled stays in memory, gigabytes over a suite; a program that is needed again has to be traced again
# and comes from the disk. The limit is half of a core's share of the machine's memory, from 2 to 4 GiB.
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
MEMORY_LIMIT = min(max(MACHINE // (os.cpu_count() or 1) // 2, 2 * 2**30), 4 * 2**30)


def resident_memory() -> int:
    """Return the bytes that this process holds (0 where there is no /proc)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


# Laws generated over the table of cases. Those of one case run one after another, wherever they are written: they share
# its compiled program, which can be let go with the last of them.
LAWS = ("laws", "gradients", "hessians", "oracle", "adversarial", "ties", "not_a_number")
GENERATED = {f"rl_fn/test_{law}.py" for law in LAWS}
GENERATED |= {"functional/test_rl_fn_parity.py"}
RECIPES = {"rl_fn/test_recipes.py", "rl_fn/test_compatibility.py", "functional/test_recipe_parity.py"}


def case_of(item) -> str | None:
    """The case, or the function of rl_fn, that a generated test is about; all recipes are one."""
    file = f"{item.path.parent.name}/{item.path.name}"
    if file in RECIPES:
        return "~recipes"
    if file not in GENERATED or not hasattr(item, "callspec"):
        return None
    return item.callspec.params.get("key") or item.callspec.params.get("name")


def pytest_addoption(parser):
    parser.addoption("--random-order", type=int, metavar="SEED", help="files, and the tests of each, in this order")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """What would make each of 20,000 tests wait."""
    if hasattr(config, "workerinput"):
        # In workers something is always frozen. A training loop asks whether anything is, and counting takes long.
        gc.get_freeze_count = lambda: 1
    # pytest-rerunfailures asks the controller before each test. Its second message in a row would wait for the first
    # one's acknowledgement, which the other end holds back for 40 ms: a fifth of the suite's time.
    if (asking := getattr(getattr(config, "failures_db", None), "sock", None)) is not None:
        asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The tests and the libraries that they import are here to stay: the garbage collector leaves them alone."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # A trace makes many objects that stay: looking through them after every 700 is a twentieth of the time.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or extension modules report what was never freed


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run; bring the generated tests of a case together, or draw an order."""
    absent = [marker for marker, there in {"vllm": WITH_VLLM, "tools": WITH_TOOLS}.items() if not there]
    without = [item for item in items if any(item.get_closest_marker(marker) for marker in absent)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
    if (seed := config.getoption("--random-order")) is not None:
        from tests.support.ordering import in_random_order

        items[:] = in_random_order(items, seed)
        return
    cases = [case_of(item) for item in items]
    generated = sorted(((case, i) for i, case in enumerate(cases) if case), key=lambda x: (x[0].split("[")[0], *x))
    if generated:
        start = next(i for i, case in enumerate(cases) if case)
        rest = [item for item, case in zip(items, cases, strict=True) if not case]
        items[:] = [*rest[:start], *(items[i] for _, i in generated), *rest[start:]]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Between two test functions or cases, give compiled programs back once the process has grown large.

    An engine that ends collects all garbage. What the tests of a file have left, programs of JAX above all, is frozen,
    so that these collections do not look at it. The value that a doctest showed last goes as well: when tyro is
    imported, it makes a set of all builtins.
    """
    vars(builtins).pop("_", None)

    def about(item):
        return case_of(item) or item.nodeid.split("[")[0]

    same = nextitem is not None and about(nextitem) == about(item)
    large = not same and resident_memory() > MEMORY_LIMIT
    if large:
        gc.unfreeze()
        jax.clear_caches()
    if large or nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    if large and sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


# These files import an extra at their top, and this suite runs without extras.
collect_ignore = [] if importlib.util.find_spec("ray") else ["bridge/rl_bridge/executors/ray.py"]
WITH_TOOLS = importlib.util.find_spec("mlflow") is not None
WITH_VLLM = importlib.util.find_spec("vllm") is not None
if not WITH_VLLM:
    top = re.compile(r"^(from|import) vllm\b", flags=re.MULTILINE)
    files = (Path(__file__).parent / folder for folder in ("bridge/rl_bridge/rollout", "tests/bridge/rollout"))
    engines = sorted(path for folder in files for path in folder.glob("*/*.py"))
    collect_ignore += [str(path) for path in engines if top.search(path.read_text())]


def pytest_terminal_summary(terminalreporter):
    """A test that is run again shows what it said before: a fault that is seen once has to be found by that."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"run again: {report.nodeid}, {report.when}")
        terminalreporter.line(report.longreprtext[-20_000:])
