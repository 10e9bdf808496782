"""A warm process: imports JAX and the tests once, then runs the tests of one mutant after another in itself.

Everything runs eagerly: `jax.jit` is replaced before the tests are imported, so no function of ours is compiled and
no compiled function can outlive the code it was made of. JAX's own operations, compiled once, serve every mutant.
"""

import functools
import os
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Not about the mathematics, or meaningless without jax.jit.
EXCLUDED = ("test_registry.py", "test_jit_and_eager_agree", "test_a_case_is_deterministic")
# Processor time, for a test and for a mutant: on a busy machine a slow test is not one that hangs.
ITEM_SECONDS, MUTANT_ITEMS, LEAST_ITEMS = 20, 150, 8


def _eager(function: Any = None, **_: Any) -> Any:
    if function is None:
        return _eager
    import jax
    import numpy as np

    @functools.wraps(function, assigned=("__name__", "__doc__", "__module__"), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(
            *jax.tree.map(lambda x: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x, args), **kwargs
        )

    return call


def tier(nodeid: str) -> int:
    """Oracle comparisons, then doctests and hand-worked values, then laws: what kills most for the least."""
    return 0 if "test_equals_the_oracle" in nodeid else 2 if "test_laws" in nodeid else 1


def _too_long(*_: Any) -> None:
    raise TimeoutError("a mutant's test took too long")


class Plugin:
    """pytest's loop over the collected tests, replaced by a loop over requests."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.timed_out = False
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, float] = {}
        self.unsteady: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not any(word in item.nodeid for word in EXCLUDED)]

    def pytest_runtestloop(self, session: Any) -> bool:
        from tests.mutation import by_hand
        from tests.mutation.patch import Package
        from tests.mutation.selection import Selection

        self.items = {item.nodeid: item for item in session.items}
        self.globs = {n: dict(item.dtest.globs) for n, item in self.items.items() if hasattr(item, "dtest")}
        self.caches = [
            x
            for name, module in list(sys.modules.items())
            if name.startswith("tests.")
            for x in vars(module).values()
            if isinstance(x, functools._lru_cache_wrapper)
        ]
        self.package = Package(ROOT / "rl_fn", "rl_fn")
        self.package.add([x for x in by_hand.read("rl_fn") if not by_hand.wrong(x, ROOT)], ROOT)
        self.selection = Selection(list(self.items), ROOT, self.package.trees)
        self.connection.send(("ready", sorted(self.items)))
        while (request := self.connection.recv()) is not None:
            self.connection.send(getattr(self, request[0])(*request[1:]))
        return True

    def passes(self, nodeid: str) -> bool:
        """Run one test, without the reports that pytest would write about it."""
        item = self.items[nodeid]
        item._initrequest()
        if nodeid in self.globs:
            item.dtest.globs = dict(self.globs[nodeid])
        begun = time.process_time()
        self.timed_out = False
        signal.setitimer(signal.ITIMER_PROF, ITEM_SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                item.session._setupstate.setup(item)
                item.runtest()
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            self.timed_out = isinstance(error, TimeoutError)
            return isinstance(error, pytest.skip.Exception)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            item.session._setupstate.teardown_exact(None)
            self.seconds[nodeid] = time.process_time() - begun
        return True

    def order(self, mutant: Any) -> list[str]:
        """Tests that killed neighbours first; then the nearest, in turn from each test function, cheap kinds first."""
        distances = self.selection.of(self.package.owner(mutant), mutant.file)
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        for nodeid in sorted(distances, key=lambda n: (self.seconds.get(n, 0.0), n)):
            groups[distances[nodeid], nodeid.split("[")[0]].append(nodeid)
        turns = [
            # Every case of the function itself against its oracle comes before anything else.
            (
                distance,
                turn if tier(nodeid) or distance > 0 else -1,
                tier(nodeid),
                self.seconds.get(nodeid, 0.0),
                nodeid,
            )
            for (distance, _), members in groups.items()
            for turn, nodeid in enumerate(members)
        ]
        kills = self.kills[f"{mutant.file}:{mutant.owner}"]
        first = [nodeid for nodeid, _ in kills.most_common(8)]
        ordered = [n for *_, n in sorted(turns)]
        likely = self.likely(mutant)
        # What only checks arguments comes last for a mutant elsewhere.
        hinted = [n for n in ordered if any(word in n for word in likely)][:60] if likely else []
        late = [n for n in ordered if "/test_arguments.py" in n or "/test_defaults.py" in n]
        rest = [n for n in ordered if n not in set(late)]
        own = [n for n in ordered if distances[n] < 0]
        unique = dict.fromkeys([*first, *own, *hinted, *rest, *late])
        return [n for n in unique if n not in self.unsteady][:MUTANT_ITEMS]

    def likely(self, mutant: Any) -> tuple[str, ...]:
        """Parts of the names of the tests that see such a mutant if any does."""
        constant = mutant.owner[:1].isupper() and "." not in mutant.owner
        if mutant.kind == "default" or constant:
            return ("defaults",)
        first, *after = self.package.sources[mutant.file][mutant.line - 1 : mutant.line + 1]
        if "require(" in first or "Range(" in first or any(line.lstrip().startswith("raise ") for line in after):
            return ("test_arguments", "refused", "raises", "bounds", "impossible", "missing", "is_named")
        dropped = mutant.kind == "dropped" and ("keep" in mutant.before or "stop_gradient" in mutant.before)
        return ("no_gradient", "masked_positions") if dropped else ()

    def run(self, identity: str, budget: float) -> tuple[str, str, float, int]:
        """Status, the test that killed it, seconds, and how many tests ran."""
        mutant = self.package.mutants[identity]
        begun, ran = time.process_time(), 0
        for cache in self.caches:
            cache.cache_clear()
        nodes = self.order(mutant)
        if not nodes:
            return "uncovered", "", 0.0, 0
        with self.package.applied(mutant):
            for nodeid in nodes:
                ran += 1
                if not self.passes(nodeid):
                    self.kills[f"{mutant.file}:{mutant.owner}"][nodeid] += 1
                    status = "timeout" if self.timed_out else "killed"
                    return status, nodeid, time.process_time() - begun, ran
                # The first run of a test compiles its operations: without a least number a cold process would try few.
                if time.process_time() - begun > budget and ran >= LEAST_ITEMS:
                    break
        return "survived", "", time.process_time() - begun, ran

    def check(self, nodeids: list[str]) -> list[str]:
        """The tests that fail without any mutant: state that a mutant left behind, or a test that is not steady."""
        for cache in self.caches:
            cache.cache_clear()
        return [nodeid for nodeid in nodeids if not self.passes(nodeid)]

    def avoid(self, nodeids: set[str]) -> str:
        self.unsteady = nodeids
        return "avoided"


def serve(connection: Connection, paths: list[str], examples: int, compiled: str, log: str) -> None:
    """Entry point of the process; an interrupt is for the supervisor to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.nice(19)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge")]

    # Compiling is most of the work, and what is compiled runs a few times on a few numbers.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    signal.signal(signal.SIGPROF, _too_long)
    import hypothesis

    hypothesis.settings.register_profile(
        "mutation",
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.jit = _eager
    # Eager operations are compiled one by one; a later run finds them on disk.
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    options = [
        "-q",
        "-m",
        "not slow and not peers",
        # Hypothesis is imported above, for its profile, and this module before pytest could rewrite it.
        "-Wignore::pytest.PytestAssertRewriteWarning",
    ]
    pytest.main([*options, *paths], plugins=[Plugin(connection)])
