"""Other libraries' functions loaded and compared with ours, and the table of it."""

import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rl_fn

# Modules of other libraries, also where the package around them needs what is not installed.

DISTRIBUTIONS = {"trl": "trl", "verl": "verl", "openrlhf": "openrlhf", "tunix": "google-tunix"}


class Absent(ModuleNotFoundError):
    """A library that is not installed."""


def version(library: str) -> str:
    """The installed version; Absent with what to do where there is none."""
    name = DISTRIBUTIONS[library]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise Absent(f"{library} is not installed: see experiments/peers/README.md (make peers)") from None


class Anything(type):
    """The class of stand-in classes: whatever is looked up in one is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Placeholder(types.ModuleType):
    """A module that is not installed, imported at the top of one whose functions need none of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


@contextlib.contextmanager
def placeholders(names: Sequence[str]) -> Iterator[None]:
    """Stand-ins for the named modules that cannot be imported, while another module is loaded."""
    added = [name for name in names if name not in sys.modules]
    sys.modules.update({name: Placeholder(name) for name in added})
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def bare_packages(names: Sequence[str]) -> None:
    """Packages whose __init__ is skipped: it imports engines that the functions beside it do not need."""
    for name in names:
        if name in sys.modules:
            continue
        parent, _, leaf = name.rpartition(".")
        if parent:
            paths = [f"{folder}/{leaf}" for folder in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise Absent(f"{name} is not installed")
            paths = list(spec.submodule_search_locations)
        module = types.ModuleType(name)
        module.__path__ = paths
        sys.modules[name] = module


def load(name: str, *, bare: Sequence[str] = (), stand_ins: Sequence[str] = ()) -> types.ModuleType:
    """The module, without the __init__ of the bare packages and with stand-ins for what is not installed."""
    bare_packages(bare)
    with placeholders(stand_ins):
        return importlib.import_module(name)


def run_branch(function: Callable[..., Any], mentions: str, assigns: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the first `if` or `for` of an installed function whose head mentions a text and whose body sets a name.

    Some trainers compute in the middle of a long method. Their own statement is taken out of their own source and run
    on the given names, so that what is compared is what they ship. Returns the names it leaves behind.
    """
    plain = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.For):
            continue
        if mentions not in ast.unparse(node.test if isinstance(node, ast.If) else node.iter):
            continue
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if assigns in stored:
            names = {**plain.__globals__, **given}
            exec(compile(ast.Module([node], []), inspect.getfile(plain), "exec"), names)
            return names
    raise LookupError(f"{plain.__qualname__} has no branch on {mentions!r} that sets {assigns!r}")


# One comparison: a library's own function, our version of it, and what rl_fn gives without the dialect.

PROMPTS, GROUP, TOKENS = 4, 3, 10
ROWS = PROMPTS * GROUP
Numbers = tuple[np.ndarray, np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Example:
    """Random float32 arrays, `ROWS × TOKENS`: ragged answers, one with a hole, and one without a token if asked for."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray

    @classmethod
    def random(cls, seed: int, *, empty_row: bool = False, hole: bool = False, spread: float = 0.4) -> "Example":
        """Old, rollout and reference log-probabilities lie about `spread` nats from the policy's."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, TOKENS + 1, ROWS)
        lengths[0] = 0 if empty_row else TOKENS
        mask = np.arange(TOKENS)[None, :] < lengths[:, None]
        mask[1] = True
        mask[1, 3:5] = not hole
        new = -rng.gamma(2.0, 0.7, (ROWS, TOKENS)) - 0.05
        old, rollout, ref = (np.minimum(new + rng.normal(0, spread, new.shape), -1e-3) for _ in range(3))
        entropies = rng.gamma(2.0, 0.5, new.shape)
        advantages, values = rng.normal(size=new.shape), rng.normal(size=new.shape)
        rewards = rng.normal(size=(PROMPTS, GROUP)).round(2)
        new, old, rollout, ref = (x.astype(np.float32) for x in (new, old, rollout, ref))
        entropies, advantages, values = (x.astype(np.float32) for x in (entropies, advantages, values))
        return cls(new, old, rollout, ref, entropies, advantages, values, mask, rewards.astype(np.float32))

    def batch(self, **arrays: Any) -> rl_fn.Batch:
        """A Batch of everything, for objectives."""
        fields = {name: jnp.asarray(getattr(self, name)) for name in rl_fn.Batch._fields if hasattr(self, name)}
        return rl_fn.Batch(**{**fields, **arrays})

    def torch(self) -> dict[str, torch.Tensor]:
        """Every array as a tensor; the mask as numbers, as trainers have it, and logprobs with a gradient."""
        tensors = {f.name: torch.from_numpy(np.array(getattr(self, f.name))) for f in dataclasses.fields(self)}
        tensors["mask"] = tensors["mask"].float()
        tensors["logprobs"].requires_grad_()
        return tensors

    def grouped(self, name: str) -> jax.Array:
        """An array as `PROMPTS × GROUP × TOKENS`."""
        return jnp.asarray(getattr(self, name)).reshape(PROMPTS, GROUP, TOKENS)

    def token_rewards(self) -> np.ndarray:
        """Each answer's reward on its last counted token."""
        out = np.zeros((ROWS, TOKENS), np.float32)
        for row, reward in enumerate(self.rewards.reshape(-1)):
            counted = np.flatnonzero(self.mask[row])
            if len(counted):
                out[row, counted[-1]] = reward
        return out


@dataclasses.dataclass(frozen=True)
class Case:
    """`peer` and `ours` give a value and, if there is one, its gradient; `default` is rl_fn without the dialect."""

    name: str
    peer: Callable[[Example], Numbers]
    ours: Callable[[Example], Numbers]
    default: Callable[[Example], Numbers] | None = None
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-5
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Largest absolute differences over the examples; `agrees` to the tolerance, relative to max(1, |peer|)."""

    library: str
    name: str
    value: float
    gradient: float | None
    default: float | None
    agrees: bool
    note: str


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Largest |a − b|, and the same relative to max(1, |b|); infinite where only one is finite or shapes differ."""
    if a.shape != b.shape:
        return float("inf"), float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, 0.0, np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)))
    gap = np.where(np.isnan(gap), np.inf, gap)
    return float(gap.max(initial=0.0)), float((gap / np.maximum(1.0, np.nan_to_num(np.abs(b), nan=1.0))).max(initial=0))


def compare(library: str, case: Case, seeds: int = 3) -> Row:
    """Run a case on a few random examples."""
    value = gradient = default = relative = 0.0
    has_gradient = False
    for seed in range(seeds):
        example = Example.random(seed, **case.example)
        peer, numbers = case.peer(example), case.ours(example)
        gap, scaled = difference(numbers[0], peer[0])
        value, relative = max(value, gap), max(relative, scaled)
        if peer[1] is not None and numbers[1] is not None:
            has_gradient = True
            gap, scaled = difference(numbers[1], peer[1])
            gradient, relative = max(gradient, gap), max(relative, scaled)
        if case.default is not None:
            plain = case.default(example)
            default = max(default, difference(plain[0], peer[0])[0])
            if plain[1] is not None and peer[1] is not None:
                default = max(default, difference(plain[1], peer[1])[0])
    return Row(
        library,
        case.name,
        value,
        gradient if has_gradient else None,
        default if case.default is not None else None,
        relative <= case.tolerance,
        case.note,
    )


def torch_numbers(loss: torch.Tensor, logprobs: torch.Tensor) -> Numbers:
    """A torch loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach().numpy(), gradient.numpy()


def jax_numbers(function: Callable[[jax.Array], jax.Array], x: np.ndarray) -> Numbers:
    """The value of a function and its gradient."""
    value, gradient = jax.value_and_grad(function)(jnp.asarray(x))
    return np.asarray(value), np.asarray(gradient)


def objective(built: rl_fn.Objective) -> Callable[[Example], Numbers]:
    """Loss and gradient of an objective."""

    def run(example: Example) -> Numbers:
        return jax_numbers(lambda x: built(example.batch(logprobs=x))[0], example.logprobs)

    return run


# The comparison as rows, as a table on the screen, and as an exit status.

LIBRARIES = tuple(DISTRIBUTIONS)
MODULES = {
    "trl": ("trl_losses", "trl_pairs"),
    "verl": ("verl_cases",),
    "openrlhf": ("openrlhf_cases",),
    "tunix": ("tunix_cases",),
}


def rows(library: str, seeds: int = 3) -> list[Row]:
    """Run every comparison with an installed library; Absent without it."""
    version(library)
    # Other libraries set up their logging and accelerators at import; none of it is needed to compute a loss on a CPU.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(f"rl_tools.check.{name}") for name in MODULES[library]]
        return [compare(library, case, seeds) for module in modules for case in module.cases()]


def number(x: float | None) -> str:
    """Two digits, or a dash for what does not exist."""
    return "–" if x is None else f"{x:.1e}"


def table(library: str, found: Sequence[Row]) -> Table:
    """Largest absolute differences of value and gradient, and what rl_fn's own recipe would differ by."""
    out = Table(title=f"rl_fn.dialects.{library} against {DISTRIBUTIONS[library]} {version(library)}")
    out.add_column("what", overflow="fold")
    for name in ("value", "gradient", "rl_fn without the dialect"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("")
    for row in found:
        mark = "ok" if row.agrees else "[bold red]differs[/]"
        out.add_row(row.name, number(row.value), number(row.gradient), number(row.default), mark)
    return out


def check_library(library: str) -> int:
    """Print the table; 0 if all agree, 1 if something differs beyond tolerance, 2 without the library."""
    console = Console()
    try:
        results = rows(library)
    except Absent as absent:
        console.print(f"rl-fn check: {absent}", style="red", highlight=False)
        return 2
    console.print(table(library, results))
    wrong = [row.name for row in results if not row.agrees]
    console.print(f"{len(results) - len(wrong)} of {len(results)} agree")
    return 1 if wrong else 0
