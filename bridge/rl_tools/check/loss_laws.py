"""``rl-fn check FILE.py:loss``: the laws of our own losses over one of the user's, and what its gradient is."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
import torch

import rl_fn
from rl_bridge.functional import from_jax
from rl_bridge.modules.own_loss import FileFunction, LossTrial, TorchLoss, check_loss, equal_where, load_loss
from rl_fn.objectives.components.component import Custom
from rl_tools.check.cases import Example

Tokens = Mapping[str, torch.Tensor]
Numbers = tuple[torch.Tensor, ...]
"""The losses, their gradient in the log-probabilities and, where a loss reads these, in the entropies."""
NAMES = ("the loss", "its gradient in logprobs", "its gradient in entropies")
SPREADS = (0.02, 0.4, 1.5)
"""Nats between the policy and π_old: of an update's first step, of its last one, of a rollout that is stale."""
FAR = 20.0
"""Nats that a sampled token may have moved: one of probability 2e-9."""


@dataclass(frozen=True)
class Verdict:
    """A law, and how the loss breaks it; nothing where the law holds."""

    law: str
    problem: str = ""


def random_tokens(seed: int) -> dict[str, torch.Tensor]:
    """A batch [12, 10], 0 where the mask is False: ragged rows, rows with a hole, rows without a token."""
    example = Example.random(seed, empty_row=seed % 3 == 2, hole=seed % 2 == 1, spread=SPREADS[seed % 3])
    rng, mask = np.random.default_rng(seed), torch.from_numpy(example.mask)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies", "advantages", "values")
    fields = {name: torch.from_numpy(getattr(example, name)) for name in names}
    if seed % 2 == 0:  # as of an outcome: one advantage for the whole completion
        fields["advantages"] = fields["advantages"][:, :1].expand_as(mask).contiguous()
    for name in ("noise", "old_values", "returns"):
        fields[name] = torch.from_numpy(rng.random(mask.shape, np.float32))
    correct = mask & torch.from_numpy(rng.random((len(mask), 1)) < 0.5)
    return {name: torch.where(mask, x, 0.0) for name, x in fields.items()} | {"mask": mask, "correct": correct}


class LossLaws:
    """The laws of one loss, each over all batches."""

    def __init__(self, loss: TorchLoss | Custom) -> None:
        self._loss, self._trial = loss, LossTrial(loss)
        self._batches = [random_tokens(seed) for seed in range(6)]
        self._narrow = ""
        """Why there are no numbers in float64."""

    def laws(self) -> Iterator[Verdict]:
        """Each law in turn."""
        yield self._law("finite where it counts, also where no token of a row does", self._finite)
        yield self._law("finite where π is π_old, and where the advantage is 0", self._at_the_start)
        yield self._law(f"finite where a token of a completion has moved by {FAR:g} nats", self._far)
        yield self._law("a longer prompt and more padding change nothing", self._padded)
        yield self._law("the order of completions changes nothing", self._ordered)
        if not self._loss.over_batch:
            yield self._law("micro-batches add up to the batch", self._added)
        yield self._law("it has the digits of float32", self._digits)
        yield self._law("float32 has the numbers of float64", self._precise)
        if not self._loss.gradient_without_advantage:
            yield self._law("declared: no gradient where the advantage is 0", self._without_advantage)
        if self._loss.sequence_level:
            yield self._law("declared: each token has the loss of its completion", self._of_completions)

    def notes(self) -> Iterator[str]:
        """Facts of a loss that no law asks for and a researcher wants to know."""
        if self._narrow:
            yield f"it has no numbers in float64, which that law asks for and no run: {self._narrow}"
        is_derivative = "is" if self._is_derivative(wide=True) or self._is_derivative(wide=False) else "is not"
        detached = "" if is_derivative == "is" else ": something in it is detached, as in CISPO"
        yield f"its gradient {is_derivative} the derivative of its value{detached}"
        yield f"where π is π_old its gradient {'is' if self._on_policy() else 'is not'} −A, that of REINFORCE"
        for name in self._unread():
            yield f"it reads {name}, which changes nothing"
        wrapped = "torch_loss(" if isinstance(self._loss, TorchLoss) else "rl_fn.components.Custom(loss, "
        if self._loss.over_batch and self._added():
            yield "a token's number depends on other completions: it gets the whole batch at once, and no micro-batches"
        elif self._loss.over_batch:
            yield f"a token's number depends on no other completion: {wrapped}over_batch=False) allows micro-batches"
        elif self._loss.gradient_without_advantage and not self._without_advantage():
            yield (
                f"it has no gradient where the advantage is 0: {wrapped}gradient_without_advantage=False) saves the "
                "computation of such completions"
            )

    def _law(self, law: str, problem: Callable[[], str]) -> Verdict:
        return Verdict(law, _told(self._loss, problem))

    def _same(self, what: str, tokens: Tokens, other: Tokens, back: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """How the numbers of a batch differ from those of the same tokens, arranged otherwise; empty if they do not."""
        numbers = tuple(back(x) for x in self._trial.differentiated(other))
        return _difference(what, numbers, self._trial.differentiated(tokens), tokens["mask"])

    def _each(self, problem: Callable[[Tokens], str]) -> str:
        problems = ((seed, problem(tokens)) for seed, tokens in enumerate(self._batches))
        return next((f"batch {seed}, {text}" for seed, text in problems if text), "")

    def _finite(self) -> str:
        return self._each(self._not_finite)

    def _at_the_start(self) -> str:
        return self._each(lambda x: self._not_finite(_at_old(x)) or self._not_finite(_unrewarded(x)))

    def _not_finite(self, tokens: Tokens) -> str:
        for name, x in zip(NAMES, self._trial.differentiated(tokens), strict=False):
            strange = tokens["mask"] & ~x.isfinite()
            if strange.any():
                row, token = map(int, strange.nonzero()[0])
                names = dict.fromkeys(("logprobs", "old_logprobs", "advantages", *self._loss.required_fields))
                fields = ", ".join(f"{key} {float(tokens[key][row, token]):.4g}" for key in names if key in tokens)
                return f"completion {row}, token {token}: {name} is {float(x[row, token])} at {fields}"
        return ""

    def _far(self) -> str:
        def moved(tokens: Tokens, new: float, old: float) -> dict[str, torch.Tensor]:
            first = torch.zeros_like(tokens["mask"]).scatter(1, tokens["mask"].int().argmax(1, keepdim=True), True)
            ends = {"logprobs": new, "old_logprobs": old, "rollout_logprobs": old, "ref_logprobs": old}
            return {**tokens, **{k: torch.where(first & tokens["mask"], x, tokens[k]) for k, x in ends.items()}}

        nearly = -0.5
        return self._each(
            lambda x: (
                self._not_finite(moved(x, nearly, nearly - FAR)) or self._not_finite(moved(x, nearly - FAR, nearly))
            )
        )

    def _padded(self) -> str:
        def problem(tokens: Tokens) -> str:
            width = tokens["mask"].shape[1]
            before = {name: torch.nn.functional.pad(x, (4, 0)) for name, x in tokens.items()}
            behind = {name: torch.nn.functional.pad(x, (0, 7)) for name, x in tokens.items()}
            return self._same("behind a prompt of 4 more tokens", tokens, before, lambda x: x[:, 4:]) or self._same(
                "before 7 tokens of padding", tokens, behind, lambda x: x[:, :width]
            )

        return self._each(problem)

    def _ordered(self) -> str:
        def problem(tokens: Tokens) -> str:
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(tokens["mask"])))
            turned = {name: x[order] for name, x in tokens.items()}
            return self._same("in another order", tokens, turned, lambda x: x[order.argsort()])

        return self._each(problem)

    def _added(self) -> str:
        aggregation = rl_fn.components.Aggregation(self._loss.modes[0])
        objective = rl_fn.recipes.grpo().replace(loss=self._loss, kl=None, aggregation=aggregation)
        parts = from_jax(lambda batch: objective.parts(batch)[0])
        names = ("old_logprobs", "advantages", "mask", *self._loss.required_fields)

        def aggregated(tokens: Tokens) -> Numbers:
            """The undivided loss of an objective around this, and its gradient."""
            logprobs = tokens["logprobs"].clone().requires_grad_()
            total = parts(rl_fn.Batch(logprobs=logprobs, **{k: tokens[k] for k in names if k in tokens})).total  # type: ignore[arg-type]
            (gradient,) = torch.autograd.grad(total, logprobs)
            return total.detach(), gradient

        def problem(tokens: Tokens) -> str:
            halves = [aggregated({k: x[rows] for k, x in tokens.items()}) for rows in (slice(5), slice(5, None))]
            summed = halves[0][0] + halves[1][0], torch.cat([halves[0][1], halves[1][1]])
            return _difference("in micro-batches of 5 and 7", summed, aggregated(tokens), None)

        return self._each(problem)

    def _digits(self) -> str:
        """Losses that small steps leave as they are, and larger ones do not, are computed in fewer digits."""
        changes = {1e-4: 0, 1e-2: 0}
        for tokens in (start for batch in self._batches[:3] for start in (batch, _at_old(batch))):
            for width in changes:
                steps = torch.linspace(-width, width, 9)
                ends = [{**tokens, "logprobs": torch.where(tokens["mask"], tokens["logprobs"] + x, 0.0)} for x in steps]
                losses = torch.stack([self._trial.differentiated(x)[0][tokens["mask"]] for x in ends])
                changes[width] = max(changes[width], *losses.diff(dim=0).ne(0).sum(0).tolist())
        fewer = changes[1e-2] > 0 and changes[1e-4] <= 1
        return "a step of 2e-5 nats changes no token's loss, as of numbers in bfloat16 or float16" if fewer else ""

    def _precise(self) -> str:
        def problem(tokens: Tokens) -> str:
            try:
                with jax.enable_x64(True):
                    wide = LossTrial(self._loss).differentiated(_doubles(tokens))
            except Exception as error:  # of a function that names float32 itself
                self._narrow = _in_words(error)
                return ""
            narrowed = tuple(x.float() for x in wide)
            return _difference("in float32", self._trial.differentiated(tokens), narrowed, tokens["mask"])

        return self._each(problem)

    def _without_advantage(self) -> str:
        def problem(tokens: Tokens) -> str:
            nothing = _unrewarded(tokens)
            losses, *gradients = self._trial.differentiated(nothing)
            expected = losses, *(torch.zeros_like(x) for x in gradients)
            return _difference("", (losses, *gradients), expected, tokens["mask"] & (nothing["advantages"] == 0))

        return self._each(problem)

    def _of_completions(self) -> str:
        def problem(tokens: Tokens) -> str:
            mask, (losses, *_) = tokens["mask"], self._trial.differentiated(_of_outcomes(tokens))
            first = losses.gather(1, mask.int().argmax(1, keepdim=True)).expand_as(losses)
            return _difference("", (losses,), (first,), mask)

        return self._each(problem)

    def _is_derivative(self, *, wide: bool) -> bool:
        """Whether the gradient is the difference quotient along a random direction, in nine of ten batches' rows.

        A step that crosses a clip's edge has another quotient. In float32 the step is larger.
        """
        size, tolerance, fits = (1e-6, 1e-3, []) if wide else (1e-3, 1e-2, [])
        rng = torch.Generator().manual_seed(0)
        with jax.enable_x64(wide):
            trial = LossTrial(self._loss)
            for tokens in map(_doubles, self._batches) if wide else self._batches:
                mask = tokens["mask"]
                step = size * torch.randn(mask.shape, generator=rng, dtype=tokens["logprobs"].dtype) * mask
                try:
                    gradient = trial.differentiated(tokens)[1]
                    ends = [
                        trial.differentiated({**tokens, "logprobs": tokens["logprobs"] + x})[0] for x in (step, -step)
                    ]
                except Exception:  # in float64: the loss names float32 itself
                    return False
                change = torch.where(mask, ends[0] - ends[1], 0.0).sum(1)
                along = torch.where(mask, 2 * gradient * step, 0.0).sum(1)
                if self._loss.over_batch:
                    change, along = change.sum(0, keepdim=True), along.sum(0, keepdim=True)
                fits += torch.isclose(change, along, rtol=tolerance, atol=tolerance * size).tolist()
        return float(np.mean(fits)) >= 0.9

    def _on_policy(self) -> bool:
        def equal(tokens: Tokens) -> bool:
            tokens = _of_outcomes(_at_old(tokens))
            return equal_where([self._trial.differentiated(tokens)[1]], [-tokens["advantages"]], tokens["mask"])

        return all(map(equal, self._batches))

    def _unread(self) -> list[str]:
        """Fields that the loss says it reads, and that change neither value nor gradient."""
        # A function of a Batch does not say whether it reads old_logprobs and advantages.
        names = self._loss.reads if isinstance(self._loss, TorchLoss) else self._loss.required_fields

        def changes(tokens: Tokens, name: str) -> bool:
            other = ~tokens[name] & tokens["mask"] if name == "correct" else tokens[name].roll(1, 0) * tokens["mask"]
            before, after = (self._trial.differentiated(x) for x in (tokens, {**tokens, name: other}))
            return not equal_where(before, after, tokens["mask"])

        return [name for name in names if not any(changes(tokens, name) for tokens in self._batches if name in tokens)]


def _at_old(tokens: Tokens) -> dict[str, torch.Tensor]:
    """The same batch where all policies are π."""
    same = dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs"), tokens["logprobs"])
    return {**tokens, **same}


def _unrewarded(tokens: Tokens) -> dict[str, torch.Tensor]:
    """The same batch with advantages of 0 in every second completion."""
    rows = (torch.arange(len(tokens["mask"])) % 2 == 0)[:, None]
    return {**tokens, "advantages": torch.where(rows, 0.0, tokens["advantages"])}


def _of_outcomes(tokens: Tokens) -> dict[str, torch.Tensor]:
    """The same batch with one advantage for the whole completion."""
    mask, advantages = tokens["mask"], tokens["advantages"]
    first = advantages.gather(1, mask.int().argmax(1, keepdim=True)).expand_as(advantages)
    return {**tokens, "advantages": torch.where(mask, first, 0.0)}


def _doubles(tokens: Tokens) -> dict[str, torch.Tensor]:
    return {name: x if x.dtype == torch.bool else x.double() for name, x in tokens.items()}


def _difference(
    what: str, numbers: Numbers, expected: Numbers, mask: torch.Tensor | None, *, tolerance: float = 1e-4
) -> str:
    """Where values or gradients differ, relative to the largest of the batch, and by how much; empty if nowhere."""
    for name, x, y in zip(NAMES, numbers, expected, strict=False):
        counts = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
        scale = float(y[counts].abs().max()) if counts.any() else 0.0
        wrong = counts & ~torch.isclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, scale), equal_nan=True)
        if wrong.any():
            at = tuple(map(int, wrong.nonzero()[0]))
            where = f"completion {at[0]}, token {at[1]}: " if at else ""
            return f"{where}{name} is {float(x[at]):.6g}{what and f' {what}'}, and not {float(y[at]):.6g}"
    return ""


def _told(loss: TorchLoss | Custom, run: Callable[[], str | None]) -> str:
    """The problem that ``run`` returns or raises, with the line of the loss's file."""
    try:
        return run() or ""
    except (Exception, SystemExit) as error:
        path = loss.function.path if isinstance(loss.function, FileFunction) else ""
        cause = error.__cause__ or error
        lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == path]
        return f"{_in_words(error)}{f' ({path}, line {lines[-1]})' if lines else ''}"


def _in_words(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, ValueError | TypeError) and first else f"{type(error).__name__}: {first}"


def verdicts(source: str) -> tuple[list[Verdict], list[str]]:
    """(The laws of the loss ``FILE.py:name``, what else is known of it). A loss that no run would take has one law.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file fails to load, or the name is no loss.
    """
    loss, accepted = load_loss(source), "a run takes it: one argument, a number for each token, the same ones again"
    if problem := _told(loss, lambda: check_loss(loss)):
        return [Verdict(accepted, problem)], []
    laws = LossLaws(loss)
    every = [Verdict(accepted), *laws.laws()]
    try:
        return every, list(laws.notes())
    except Exception:
        if not any(law.problem for law in every):
            raise
        return every, []  # a batch that the loss cannot read, which a law names
