"""Test-wide switches, set before rl_fn is imported: annotations checked at run time, strict JAX promotion."""

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides when it is imported whether its kernels run in the interpreter: without a GPU they do.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiling is most of the suite's time: what one worker or test has compiled, the others read from disk. The process
# that makes the folder, pytest-xdist's controller, takes it away; its workers find the names in their environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="rl-fn-xla-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import hypothesis
import jax
import jaxtyping

jaxtyping.install_import_hook(["rl_fn"], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=400, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# What JAX has compiled stays in memory, gigabytes over a suite; a program that is needed again comes from the disk.
MEMORY_LIMIT = 2 * 2**30


def resident_memory() -> int:
    """Return the bytes that this process holds (0 where there is no /proc)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def pytest_runtest_teardown(item, nextitem):
    """Between two test functions, give compiled programs back once the process has grown large."""
    same = nextitem is not None and nextitem.nodeid.split("[")[0] == item.nodeid.split("[")[0]
    if not same and resident_memory() > MEMORY_LIMIT:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
