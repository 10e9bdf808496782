"""Losses of the user's own, in PyTorch, in JAX or from a file: tried once, and everything around them stays rl_fn's."""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import torch

from rl_bridge.common.user_files import callable_in
from rl_bridge.common.user_marks import content_of, mark_of
from rl_bridge.functional import from_jax
from rl_bridge.functional.torch_call import torch_call
from rl_fn import Batch, Objective
from rl_fn.aggregation import MODES
from rl_fn.objectives.components.component import Custom, PerToken, naming_errors

GIVEN = ("logprobs", "mask")
"""Fields that each loss gets."""
READABLE = ("old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "entropies", "correct", "noise")
"""Fields that a loss may ask for."""
TOLERANCE = 1e-5
_FORM = ("loss", "function {!r}")
"""A file of losses, as errors name what it holds."""


class LossBatch:
    """The fields that a loss reads, by name: tensors [N, T], 0 where the mask is False.

    >>> LossBatch({"logprobs": torch.zeros(1, 2)}).mask
    Traceback (most recent call last):
    AttributeError: this loss gets logprobs, not 'mask': torch_loss(reads=(…)) names what it reads
    """

    def __init__(self, fields: Mapping[str, torch.Tensor]) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> torch.Tensor:
        names = ", ".join(self.__dict__)
        raise AttributeError(f"this loss gets {names}, not {name!r}: torch_loss(reads=(…)) names what it reads")


@dataclass(frozen=True)
class TorchLoss(PerToken):
    """A function of PyTorch as an objective's loss; ``torch_loss`` makes one, and says what the fields are."""

    function: Callable[[Any], torch.Tensor]
    _: KW_ONLY
    reads: tuple[str, ...] = ("old_logprobs", "advantages")
    accepts_packed: bool = False
    over_batch: bool = False
    gradient_without_advantage: bool = True
    weighs_rollout: bool = False
    sequence_level: bool = False
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        """Refuse what is no function, and fields that no batch has."""
        if not callable(self.function):
            raise TypeError(f"torch_loss takes a function of a batch, got {self.function!r}")
        if isinstance(self.reads, str) or not all(isinstance(name, str) for name in self.reads):
            raise TypeError(f"torch_loss: reads is a tuple of names, as ('advantages',), got {self.reads!r}")
        if strange := [name for name in self.reads if name not in READABLE]:
            raise ValueError(
                f"torch_loss: reads={self.reads} names {', '.join(strange)}; a loss may read {', '.join(READABLE)}, "
                f"and gets {' and '.join(GIVEN)} always"
            )

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Fields that it reads beyond those that every batch has."""
        return tuple(name for name in self.reads if name not in ("old_logprobs", "advantages"))

    def __call__(self, batch: Batch) -> jax.Array:
        """One number per token, in ``from_jax``."""
        return torch_call(self.of_tensors, *(getattr(batch, name) for name in (*GIVEN, *self.reads)))

    def explain(self) -> str:
        """The function's name and a hash of its source; ``own_marks`` has the values around it besides."""
        try:
            text = inspect.getsource(self.function)
        except (OSError, TypeError):
            return f"{self.name}, in PyTorch"
        return f"{self.name}, in PyTorch, of source {hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def of_tensors(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The losses [N, T] of a batch's tensors, in the order of ``GIVEN`` and ``reads``.

        Raises:
            TypeError, ValueError: the function does not return a number for each token.
        """
        with naming_errors(lambda: self.name):
            losses = self.function(LossBatch(dict(zip((*GIVEN, *self.reads), tensors, strict=True))))
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            what = losses.dtype if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise TypeError(f"the loss {self.name} returns a tensor of floating-point numbers, got {what}")
        if losses.shape != tensors[0].shape:
            raise ValueError(
                f"the loss {self.name} returns a number for each token, {list(tensors[0].shape)}, got "
                f"{list(losses.shape)}: the objective's aggregation takes the mean"
            )
        return losses.to(tensors[0].dtype)


def check_loss(loss: PerToken) -> None:
    """Try a loss of the user's own on a batch of three short completions, before anything is trained. Others pass.

    Raises:
        TypeError, ValueError: with the function's name: no number for each token, numbers that are not finite, no
            gradient, or a token's number that depends on padding or, without ``over_batch``, on other completions.
    """
    if isinstance(loss, TorchLoss | Custom):
        _require_one_argument(loss.function)
        with torch.device("cpu"):  # a module is made on the meta device, which has no numbers
            LossTrial(loss).check(trial_batch(3, 6))


def _require_one_argument(function: Callable[..., Any]) -> None:
    """Refuse a function that a batch alone does not call, by its arguments; one of a file by its option and file."""
    where, own = f"the loss {getattr(function, '__name__', function)}", function
    if isinstance(function, FileFunction):
        where = f"--objective.loss {function.path}:{function.name}"
        loaded = callable_in(function.path, function.name, *_FORM)
        own = loaded.function if isinstance(loaded, TorchLoss | Custom) else loaded
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None)
    except TypeError:
        names = [{2: "*", 4: "**"}.get(p.kind, "") + p.name for p in signature.parameters.values()]
        name = getattr(function, "__name__", "loss")
        raise TypeError(
            f"{where} takes {', '.join(names) or 'no arguments'}; a loss takes one argument, the batch, and returns "
            f"the loss of each token [N, T]: def {name}(batch)"
        ) from None


class LossTrial:
    """Tries one loss on batches of tensors."""

    def __init__(self, loss: TorchLoss | Custom) -> None:
        self._loss = loss
        self._name = loss.name if isinstance(loss, TorchLoss) else loss.explain()
        self._per_token = from_jax(loss.__call__)
        self._learns = ("logprobs", *(name for name in ("entropies",) if name in loss.required_fields))

    def check(self, tokens: Mapping[str, torch.Tensor]) -> None:
        """Raise TypeError or ValueError for what ``check_loss`` refuses."""
        numbers, mask = self.differentiated(tokens), tokens["mask"]
        self._require_repeatable(tokens, numbers)
        self._require_finite(tokens, "on an ordinary batch")
        # A narrow clip, as GSPO's, cuts the gradient of each token here, and of none where π is π_old.
        start = {**tokens, "old_logprobs": tokens["logprobs"], "rollout_logprobs": tokens["logprobs"]}
        if not (numbers[1][mask].any() or self.differentiated(start)[1][mask].any()):
            raise ValueError(f"the loss {self._name} has no gradient in batch.logprobs: nothing would be trained")
        self._require_finite(start, "where π is π_old, as in the first update of a step")
        self._require_finite(_unrewarded(tokens), "where the advantage is 0, as of a group with equal rewards")
        self._require_no_parameters(tokens)
        self._require_place_independent(tokens, numbers)
        if not self._loss.gradient_without_advantage:
            self._require_no_gradient(_unrewarded(tokens))
        if self._loss.over_batch:
            return
        rows = range(len(mask))
        alone = [self.differentiated({name: x[row : row + 1] for name, x in tokens.items()}) for row in rows]
        if not equal_where([torch.cat(column) for column in zip(*alone, strict=True)], numbers, mask):
            raise ValueError(
                f"in the loss {self._name} the number of a token depends on other completions, so that micro-batches "
                "would not add up to the batch: over_batch=True gives it the whole batch at once"
            )

    def _require_finite(self, tokens: Mapping[str, torch.Tensor], where: str) -> None:
        numbers = self.differentiated(tokens)
        if not all(x[tokens["mask"]].isfinite().all() for x in numbers):
            raise ValueError(f"the loss {self._name} is not finite {where}: {numbers[0].tolist()}")

    def _require_place_independent(self, tokens: Mapping[str, torch.Tensor], numbers: tuple[torch.Tensor, ...]) -> None:
        """Refuse other numbers of a token where its row is padded further, or begins with a longer prompt."""
        mask = tokens["mask"]
        wider = {name: torch.nn.functional.pad(x, (0, 4)) for name, x in tokens.items()}
        if not equal_where([x[:, : mask.shape[1]] for x in self.differentiated(wider)], numbers, mask):
            raise ValueError(
                f"the loss {self._name} depends on how far its rows are padded: what it sums over a row, it has to "
                "multiply by batch.mask, and to divide by batch.mask.sum(1)"
            )
        behind = {name: torch.nn.functional.pad(x, (3, 0)) for name, x in tokens.items()}
        if not equal_where([x[:, 3:] for x in self.differentiated(behind)], numbers, mask):
            raise ValueError(
                f"the loss {self._name} depends on how many tokens a row has before its completion, as the prompt's: "
                "the place of a token in its completion is batch.mask.cumsum(1) - 1"
            )

    def _require_no_gradient(self, tokens: Mapping[str, torch.Tensor]) -> None:
        """Refuse a gradient of completions that are not computed, because the loss declares that they have none."""
        _, *gradients = self.differentiated(tokens)
        counted = tokens["mask"] & (tokens["advantages"] == 0)
        if any(x[counted].any() for x in gradients):
            raise ValueError(
                f"the loss {self._name} declares gradient_without_advantage=False, and has a gradient where the "
                "advantage is 0: such completions would not be computed"
            )

    def _require_repeatable(self, tokens: Mapping[str, torch.Tensor], first: tuple[torch.Tensor, ...]) -> None:
        """Refuse other numbers for the same batch, of which padding and other completions are not the cause."""
        if not equal_where(first, self.differentiated(tokens), tokens["mask"]):
            raise ValueError(
                f"the loss {self._name} gives other numbers for the same batch when it is called again: it may draw no "
                "random numbers of its own (torch_loss(reads=('noise',)) has some) and change nothing that it reads"
            )

    def _require_no_parameters(self, tokens: Mapping[str, torch.Tensor]) -> None:
        """Refuse a loss with parameters of its own, which no optimiser would have."""
        if not isinstance(self._loss, TorchLoss):
            return
        logprobs = tokens["logprobs"].clone().requires_grad_()
        fields = {name: tokens[name].clone() for name in (*GIVEN, *self._loss.reads)} | {"logprobs": logprobs}
        with torch.enable_grad():
            losses = self._loss.of_tensors(*fields.values())
        others = [leaf for leaf in _leaves(losses) if leaf is not logprobs]
        if others:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in others)
            raise ValueError(
                f"the loss {self._name} has a gradient in tensors of its own, of shapes {shapes}, which no optimiser "
                "has and no checkpoint: detach() these"
            )

    def differentiated(self, tokens: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The losses, then the gradient of their sum over tokens that count: in logprobs, and in entropies if read."""
        names = ("old_logprobs", "advantages", "mask", *self._loss.required_fields)
        fields: dict[str, Any] = {name: tokens[name].clone() for name in names if name in tokens}
        leaves = {name: tokens[name].clone().requires_grad_() for name in self._learns}
        with torch.enable_grad():
            try:
                losses = self._per_token(Batch(**{**fields, **leaves}))  # type: ignore[arg-type]
            except (TypeError, AttributeError) as error:
                if (way_on := self._way_on(error)) is None:
                    raise
                function = self._loss.function
                where = f"{function.path}: " if isinstance(function, FileFunction) else ""
                raise TypeError(f"{where}the loss {self._name} {way_on}") from error
            shape = tokens["mask"].shape
            if not isinstance(losses, torch.Tensor) or losses.shape != shape:
                actual = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
                raise ValueError(
                    f"the loss {self._name} returns a number for each token, {list(shape)}, got {actual}: the "
                    "objective's aggregation takes the mean"
                )
            total, inputs = losses[tokens["mask"]].sum(), list(leaves.values())
            gradients = (
                torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else (None,) * len(inputs)
            )
        return losses.detach(), *(
            torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)
        )

    def _way_on(self, error: Exception) -> str | None:
        """The fault of a function of JAX's arrays and the way on; None where its own error names both."""
        text = str(error)
        if isinstance(self._loss, TorchLoss):
            return None
        if "Tracer" in text and ("Tensor" in text or isinstance(error, AttributeError)):
            return (
                "gets JAX's arrays and calls PyTorch with them: write @torch_loss (of rl_bridge) above a function of "
                "PyTorch, or take jax.numpy"
            )
        if isinstance(error, jax.errors.JAXTypeError):
            return (
                "takes numbers out of JAX's arrays (by if, float() or numpy) while it is traced: take jnp.where and "
                "jax.numpy, or write @torch_loss (of rl_bridge) above a function of PyTorch"
            )
        if "NoneType" in text:
            return (
                "reads a field that it does not get: rl_fn.components.Custom(loss, required_fields=('ref_logprobs',)) "
                "names what it reads beyond logprobs, old_logprobs, advantages and mask"
            )
        return None


def _unrewarded(tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with advantages of 0 in every second completion."""
    rows = (torch.arange(len(tokens["mask"])) % 2 == 0)[:, None]
    return {**tokens, "advantages": torch.where(rows, 0.0, tokens["advantages"])}


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which a tensor's graph ends."""
    waiting, visited, leaves = [tensor.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        # The node of a leaf alone has one.
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return leaves


@dataclass(frozen=True)
class FileFunction:
    """A function of a file, called as it is there. It is pickled by the file's path, which every worker must see."""

    path: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, batch: Any) -> Any:
        """The function's value."""
        loaded = callable_in(self.path, self.name, *_FORM)
        return loaded.function(batch) if isinstance(loaded, TorchLoss) else loaded(batch)


def load_loss(source: str) -> TorchLoss | Custom:
    """The loss ``FILE.py:name``: a function of a batch in JAX, one that ``torch_loss`` wraps, or a component of rl_fn.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the source is not of that form, the file fails to load, or the name is no function.
    """
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", source)
    if match is None:
        raise ValueError(f"a loss is named FILE.py:name, got {source!r}")
    path, name = str(Path(match[1]).resolve()), match[2]
    loaded, function = callable_in(path, name, *_FORM), FileFunction(path, name)
    if isinstance(loaded, type) and issubclass(loaded, PerToken):
        raise ValueError(f"{path}: {name} is a class of components, and a loss is one of its objects, {name}(…)")
    if isinstance(loaded, Objective):
        raise ValueError(f"{path}: {name} is an objective, and --objective.loss takes the loss of one")
    if isinstance(loaded, TorchLoss):
        return replace(loaded, function=function)
    if isinstance(loaded, PerToken):
        declared = {option.name: getattr(loaded, option.name) for option in fields(Custom) if option.name != "function"}
        return Custom(function, **declared)
    return Custom(function)


def own_marks(objective: Objective) -> dict[str, str]:
    """The marks of the parts of an objective that have a function or a class of the user's, by the part's name.

    ``explain`` has the names of these alone: a resumed run notices by the mark that one was edited, or was made with
    other values around it.

    >>> import rl_fn
    >>> own_marks(rl_fn.recipes.grpo())
    {}
    """
    parts = {option.name: list(_marks_in(getattr(objective, option.name))) for option in fields(objective)}
    return {name: " + ".join(marks) for name, marks in parts.items() if marks}


def _marks_in(value: Any) -> Iterator[str]:
    """The mark of each function of the user's in a component, with what the component declares of it."""
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _marks_in(entry)
    elif isinstance(value, FileFunction):
        yield f"{value.name}:{content_of(Path(value.path))[:16]}"  # wherever the file lies
    elif is_dataclass(value) and type(value).__module__.partition(".")[0] in ("rl_fn", "rl_bridge"):
        inside = {option.name: getattr(value, option.name) for option in fields(value)}
        if marks := [mark for part in inside.values() for mark in _marks_in(part)]:
            yield " ".join([*marks, *(f"{name}={part!r}" for name, part in inside.items() if _is_plain(part))])
    elif is_dataclass(value) or callable(value):
        yield mark_of(value)


def _is_plain(value: Any) -> bool:
    texts = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    return texts or value is None or isinstance(value, bool | int | float | str)


def torch_loss(
    function: Callable[[Any], torch.Tensor] | None = None,
    *,
    reads: tuple[str, ...] = ("old_logprobs", "advantages"),
    over_batch: bool = False,
    gradient_without_advantage: bool = True,
    weighs_rollout: bool = False,
    sequence_level: bool = False,
) -> Any:
    """A loss of your own in PyTorch for ``objective.replace(loss=…)``, as decorator or call.

    The function gets a batch with ``logprobs`` (π, to be differentiated), ``mask`` and what it ``reads``, each [N, T]
    and 0 where ``mask`` is False, and returns the loss of each token, [N, T]. The objective's correction, KL, entropy
    bonus and aggregation follow, as for every other loss. ``reads`` may name old_logprobs, advantages,
    rollout_logprobs, ref_logprobs, entropies (to be differentiated), correct and noise.

    ``over_batch``: the loss of a token depends on other completions; it then gets the whole batch at once.
    ``gradient_without_advantage``: there may be a gradient where the advantage is 0; such completions are not computed
    without it. ``weighs_rollout``: it weighs by the ratio to rollout_logprobs itself. ``sequence_level``: each token
    holds the loss of its completion.

    Nothing is compared with a formula of ours. Shapes, masks and independence of other completions are tried once,
    when a ``Policy`` is made.

    >>> import torch, rl_fn
    >>> @torch_loss
    ... def clipped(batch):
    ...     ratio = (batch.logprobs - batch.old_logprobs).exp()
    ...     return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
    >>> check_loss(clipped)
    >>> rl_fn.recipes.grpo().replace(loss=clipped).loss.name
    'clipped'

    Raises:
        ValueError: ``reads`` names a field that no batch has.
    """
    options: dict[str, Any] = {
        "reads": reads if isinstance(reads, str) else tuple(reads),
        "over_batch": over_batch,
        "gradient_without_advantage": gradient_without_advantage,
        "weighs_rollout": weighs_rollout,
        "sequence_level": sequence_level,
    }
    return (lambda f: TorchLoss(f, **options)) if function is None else TorchLoss(function, **options)


def trial_batch(rows: int, width: int) -> dict[str, torch.Tensor]:
    """Numbers such as a step has, always the same ones, 0 where the mask is False."""
    drawn = torch.Generator().manual_seed(0)
    mask = torch.arange(width) < torch.arange(width, width - rows, -1)[:, None]
    logprobs = -torch.rand(rows, width, generator=drawn) * 3 - 0.05

    def near(x: torch.Tensor, by: float) -> torch.Tensor:
        return (x + by * torch.randn(rows, width, generator=drawn)).clamp(max=-0.01)

    fields = {"logprobs": logprobs, "old_logprobs": near(logprobs, 0.1), "ref_logprobs": near(logprobs, 0.3)}
    fields["rollout_logprobs"] = near(fields["old_logprobs"], 0.02)
    fields["advantages"] = torch.randn(rows, 1, generator=drawn).expand(rows, width)
    fields["entropies"] = torch.rand(rows, width, generator=drawn) * 2
    fields["noise"] = torch.rand(rows, width, generator=drawn)
    for name in ("values", "old_values", "returns"):
        fields[name] = torch.randn(rows, width, generator=drawn)
    fields = {name: torch.where(mask, x, 0.0) for name, x in fields.items()}
    return {**fields, "mask": mask, "correct": mask & (torch.arange(rows) % 2 == 0)[:, None]}


def equal_where(left: Any, right: Any, mask: torch.Tensor) -> bool:
    """Whether tensors are equal where the mask is True, up to rounding; NaN equals itself."""
    close = functools.partial(torch.allclose, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return all(close(a[mask], b[mask]) for a, b in zip(left, right, strict=True))
