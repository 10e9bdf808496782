"""An engine of vLLM with the weights of its trainer: every sync ends in a proved update or in a replaced engine."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rl_bridge.common.files import TemporaryFolder
from rl_bridge.engines.dispatch import returns
from rl_bridge.rollout.rollout_worker import Advancing, Conversing, Generating
from rl_bridge.rollout.vllm.client import EngineClient
from rl_bridge.rollout.vllm.weight_copies import Copy, VLLMReceiver
from rl_bridge.rollout.vllm.weight_probe import (
    Drawn,
    Probe,
    ProbeFailed,
    Tolerance,
    check_again,
    check_drawn,
    check_scored,
    joined,
)
from rl_bridge.weights.ends import WeightSyncError
from rl_bridge.weights.manifest import Manifest, TensorSpec, compare
from rl_bridge.weights.source import Through

BUCKET_BYTES = 256 << 20


class UpdateFailed(WeightSyncError):
    """A step of an update failed. Unless it was the first one, the engine must be replaced."""


class WeightUpdate:
    """One update of an engine as a checklist: it is proved, or it raised and the engine is to be replaced.

    In its first half the engine takes a complete copy and draws; in the second the trainer's scores are the proof. In
    between the engine is paused, so that no tokens of unproved weights are given out.
    """

    def __init__(
        self, client: EngineClient, copy: Copy, expected: dict[str, TensorSpec], probe: Probe, blind: Mapping[str, str]
    ) -> None:
        """``expected``: names, shapes and dtypes of the checkpoint that the engine started from.

        ``blind``: as ``compared`` has it.
        """
        assert copy.version is not None, "the copy is complete"
        self.touched = False
        """Whether the engine was asked to change anything."""
        self._client, self._copy, self._expected = client, copy, expected
        self._probe, self._blind = probe, blind
        self._version = str(copy.version)
        self._drawn: Drawn | None = None

    def run(self) -> Drawn:
        """Everything but the proof.

        Raises:
            UpdateFailed: names the step.
        """
        client, version = self._client, self._version
        with self._step("compare with the engine's checkpoint"):
            compare(Manifest(self._copy.specs), Manifest(self._expected), f"weights of version {version}")
        self.touched = True
        with self._step("fill the prefix cache with the probe's prompt"):
            client.generate(self._probe.prompt, count=1, seed=self._probe.seed, temperature=1.0)
        with self._step("pause"):
            client.pause()
            if not client.is_paused():
                raise UpdateFailed("the engine says that it is not paused; its requests would read layers in pieces")
        if self._copy.adapter:
            with self._step("load the adapter"):
                client.adopt(self._copy.folder, version)
        else:
            with self._step("start"):
                client.start()
            for number, names in enumerate(buckets_by_layer(self._copy.specs, BUCKET_BYTES)):
                with self._step(f"load bucket {number} ({names[0]} …)"):
                    client.update(self._copy.folder, names)
        with self._step("finish"):
            if not self._copy.adapter:
                client.finish(version)
            if client.version() != version:
                raise UpdateFailed(f"the engine says that it has version {client.version()!r}")
        with self._step("compare what the engine holds"):
            compared(client, self._copy, self._blind)
        with self._step("reset the prefix cache"):
            if not client.reset_prefix_cache():
                raise UpdateFailed("the engine kept blocks of the old weights' keys and values")
        with self._step("probe"):
            self._drawn = probed(client, self._probe, version)
        return self._drawn

    def prove(self, drawn: Drawn, expected: Sequence[float], tolerance: Tolerance) -> None:
        """Compare the drawn tokens with the trainer's log-probabilities of them, and let the engine go on.

        Raises:
            UpdateFailed: they are not the same policy's.
        """
        assert self._drawn is not None, "run() comes first"
        with self._step("proof"):
            check_scored(drawn, expected, tolerance)
        with self._step("resume"):
            self._client.resume()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise UpdateFailed(f"update to version {self._version}, step '{name}': {error}") from error


def compared(client: EngineClient, copy: Copy, blind: Mapping[str, str]) -> None:
    """Compare each of the engine's tensors with the copy that it was loaded from.

    ``blind``: the tensors left out, which this engine did not show, or not in a known order, when it had the checkpoint
    that it started from.

    Raises:
        UpdateFailed: a tensor is not the sent one, or is not shown any more.
    """
    comparison = client.held(copy.folder, copy.folder if copy.adapter else None)
    bad = comparison.different | comparison.unread
    faults = [f"{name}: {what}" for name, what in bad.items() if name not in blind]
    if faults:
        more = f"; and {len(faults) - 4} more tensors" if len(faults) > 4 else ""
        raise UpdateFailed("; ".join(faults[:4]) + more)


def probed(client: EngineClient, probe: Probe, version: str) -> Drawn:
    """The probe's tokens, of this version and from an empty cache."""
    drawn = client.generate(probe.prompt, count=probe.count, seed=probe.seed, temperature=probe.temperature)
    check_drawn(drawn, probe, version)
    return drawn


def buckets_by_layer(tensors: dict[str, TensorSpec], size: int) -> Iterable[list[str]]:
    """Names in buckets of about ``size`` bytes, a layer never cut: vLLM processes a layer when all of it is there.

    The names of a layer's tensors have the same first number.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in tensors:
        layers.setdefault(_layer(name), []).append(name)
    bucket: list[str] = []
    filled = 0
    for names in layers.values():
        nbytes = sum(tensors[name].nbytes for name in names)
        if bucket and filled + nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket += names
        filled += nbytes
    if bucket:
        yield bucket


def _layer(name: str) -> tuple[str, str]:
    """The part of a name before its first number, and the number.

    >>> _layer("model.layers.3.mlp.experts.7.w1"), _layer("lm_head.weight")
    (('model.layers', '3'), ('lm_head.weight', ''))
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), part
    return name, ""


logger = logging.getLogger(__name__)

REPLACEMENTS = 3
"""Updates in a row that may need a fresh engine, unless an option says otherwise."""


class Attempt(NamedTuple):
    """The state of an update in one worker: the draw to be scored (None: nothing more), the failure on the way.

    ``version``: of the proved weights in use; None while an update waits for its proof.
    ``not_compared``: tensors of the engine for which its samples alone speak.
    """

    drawn: Drawn | None
    failure: str | None
    version: int | None
    not_compared: int = 0


class Proof(NamedTuple):
    """The draw and the scores that proved an update: a fresh engine with the same weights has to draw the same."""

    probe: Probe
    drawn: Drawn
    scored: tuple[float, ...]
    """The trainer's log-probabilities of the drawn tokens."""


class UpdatedEngine:
    """The states of an engine under updates: in use → taking a copy → waiting for its proof → in use.

    A failure replaces the engine by a fresh one from the complete copy, which needs the same proof. If that one
    fails too, the weights that came are not what the trainer computes with: the engine goes back to the last proved
    copy, whose tokens it has to draw again, or to the checkpoint that it started from.
    """

    def __init__(
        self,
        client: EngineClient,
        checkpoint: Path,
        *,
        tolerance: Tolerance,
        copies: Path | None = None,
        replacements: int = REPLACEMENTS,
        adapter_rank: int | None = None,
    ) -> None:
        """``checkpoint``: the folder that the client's engine started from. ``copies``: where copies lie.

        ``adapter_rank``: as ``VLLMReceiver`` has it.
        ``replacements``: updates in a row that may need a fresh engine; with one more, ``prove`` raises.
        """
        self.client = client
        self.receiver = VLLMReceiver(checkpoint, copies=copies, adapter_rank=adapter_rank)
        self.replaced = 0
        """Times that the engine was replaced."""
        self._tolerance, self._measured = tolerance, False
        self._most, self._in_a_row = replacements, 0
        self._version: int | None = 0
        self._proved = 0
        self._proof: Proof | None = None
        self._probe: Probe | None = None
        self._update: WeightUpdate | None = None
        self._copy: Copy | None = None
        self._drawn: Drawn | None = None
        self._looks: list[tuple[Drawn, tuple[float, ...]]] = []
        self._failure: str | None = None
        self._blind: dict[str, str] | None = None

    def version(self) -> int:
        """The version of the proved weights in use.

        Raises:
            ValueError: an update has begun and has no proof, or weights came that the engine did not take over.
        """
        if self._version is None:
            raise ValueError("an update of this engine of vLLM has no proof: engine.sync_weights brings one")
        if self.receiver.version is not None and self.receiver.version != self._version:
            raise ValueError(
                f"weights of version {self.receiver.version} came, and the engine still has {self._version}: "
                "engine.sync_weights carries them into the engine"
            )
        return self._version

    def restart(self) -> None:
        """A fresh engine from the last proved weights, for one that is gone. Its requests begin again.

        Raises:
            UpdateFailed: no engine opens.
        """
        self._failure = "the engine is gone"
        self._go_back("it is started again")

    def take(self, version: int, temperature: float) -> Attempt:
        """Carry the complete copy of ``version`` into the engine; the tokens to be scored at ``temperature``.

        Raises:
            UpdateFailed: the copy does not fit the engine or is older than its weights, and the engine was not
                touched; or no fresh engine could be opened.
        """
        copy = self.receiver.arrived(version)
        if version < self._proved:
            self.receiver.version = self._version  # the engine goes on with the weights that it has
            raise UpdateFailed(f"weights of version {version} came after those of version {self._proved}")
        self._probe = Probe.of(self.client.limits(), temperature)
        if self._blind is None and not copy.adapter:
            self._blind = self._look_at_the_first()
        update = WeightUpdate(self.client, copy, self.receiver.expected(copy), self._probe, self._blind or {})
        self._version, self._copy, self._failure, self._looks = None, copy, None, []
        try:
            self._update, self._drawn = update, update.run()
        except UpdateFailed as error:
            if not update.touched:
                self._go_on(self._proved)
                raise
            self._replace(str(error))
        return self._stands()

    def prove(self, scored: Mapping[tuple[int, ...], tuple[float, ...]]) -> Attempt:
        """Compare with the trainer's log-probabilities, by ``Drawn.sequence``; no ``drawn``: nothing is left to do.

        Raises:
            UpdateFailed: no fresh engine could be opened; or one more update in a row needed a fresh engine than may.
        """
        if self._drawn is None:
            return self._stands()
        assert self._copy is not None and self._probe is not None, "take() comes first"
        self._looks.append((self._drawn, tuple(scored[self._drawn.sequence])))
        drawn, expected = joined(self._looks)
        allowed = self._tolerance if self._measured or self._blind else self._tolerance.of_trusted()
        try:
            if len(self._looks) == 1 and self._wants_more(drawn, expected, allowed):
                self._drawn = probed(self.client, self._probe.longer(self.client.limits()), str(self._copy.version))
                return self._stands()
            if self._update is not None:
                self._update.prove(drawn, expected, allowed)
            else:
                check_scored(drawn, expected, allowed)
                self.client.resume()
        except Exception as error:
            if self._update is not None:
                self._replace(str(error))
            else:
                self._go_back(f"a fresh engine from the same weights: {error}")
            return self._stands()
        self.receiver.copies.prove(self._copy)
        self._proof = Proof(self._probe, *self._looks[0])
        if not self._measured:
            self._tolerance, self._measured = self._tolerance.measured(drawn, expected), True
        self._go_on(self._copy.version)
        self._in_a_row = 0 if self._failure is None else self._in_a_row + 1
        if self._in_a_row > self._most:
            raise UpdateFailed(
                f"{self._in_a_row} updates in a row needed a fresh engine, and {self._most} may. The engine has "
                f"version {self._version}, proved. The last failure: {self._failure}"
            )
        return self._stands()

    def _wants_more(self, drawn: Drawn, expected: tuple[float, ...], allowed: Tolerance) -> bool:
        """The first proof is measured with more tokens; later ones get a second look where the first does not do."""
        try:
            check_scored(drawn, expected, allowed)
        except ProbeFailed:
            return True
        return not self._measured

    def _stands(self) -> Attempt:
        return Attempt(self._drawn, self._failure, self._version, len(self._blind or {}))

    def _replace(self, failure: str) -> None:
        """A fresh engine from the copy that came, and its probe."""
        assert self._copy is not None and self._probe is not None
        logger.warning("%s; the engine is replaced", failure)
        self._failure, self._update, self._drawn, self._looks = failure, None, None, []
        version = str(self._copy.version)
        try:
            self._open(self._copy, version)
            self._drawn = probed(self.client, self._probe, version)
        except Exception as error:
            self._go_back(f"a fresh engine from the same weights: {error}")

    def _go_back(self, failure: str) -> None:
        """A fresh engine from the last weights that were proved."""
        self._failure, self._drawn, self._version = f"{self._failure}; {failure}", None, None
        logger.warning("%s; the engine goes back to version %d", failure, self._proved)
        try:
            self._open(self.receiver.copies.proved, str(self._proved))
            self._prove_again()
            self.client.resume()
        except Exception as error:
            raise UpdateFailed(
                f"{self._failure}; no engine opens with version {self._proved} either: {error}"
            ) from error
        self._go_on(self._proved)

    def _prove_again(self) -> None:
        """The last proof once more: the trainer's word on the tokens that these weights draw is known.

        The checkpoint of the beginning has none, and its engine was asked for none when it opened first.
        """
        if self._proof is not None:
            probe, drawn, scored = self._proof
            # Its own look may have needed a second one to be believed.
            wide = replace(self._tolerance, fixed=False).measured(drawn, scored)
            check_again(probed(self.client, probe, str(self._proved)), drawn, scored, wide)

    def _open(self, copy: Copy | None, version: str) -> None:
        """Replace the engine by one from a copy; None: from the checkpoint that the first engine started from."""
        self.replaced += 1
        checkpoint = self.receiver.copies.checkpoint
        if copy is not None and copy.adapter:
            self.client.replace(checkpoint, version, copy.folder)
        else:
            self.client.replace(checkpoint if copy is None else copy.folder, version)
        if copy is not None:
            compared(self.client, copy, self._blind or {})

    def _look_at_the_first(self) -> dict[str, str]:
        """Tensors that cannot be compared in this engine: it shows others for the very weights that it started from.

        A tensor that is not read, or is in an order that only vLLM knows, is logged once; the samples speak for it.
        """
        comparison = self.client.held(self.receiver.copies.checkpoint)
        order = dict.fromkeys(comparison.different, "in another order or form than it was sent")
        blind = order | comparison.unread
        if blind:
            reasons = [f"{name} ({why})" for name, why in blind.items()]
            logger.warning(
                "%d tensors of the engine cannot be compared with what is sent, for them its samples speak alone: %s",
                len(reasons),
                "; ".join(reasons[:8]) + ("; …" if len(reasons) > 8 else ""),
            )
        return blind

    def _go_on(self, version: int | None) -> None:
        self._version = self.receiver.version = version
        if version is not None:
            self._proved = version
        self._drawn = self._update = None
        self._looks = []


class TakesProvedWeights:
    """The methods of a rollout worker that ``TrainEngine.sync_weights`` calls after the weights came."""

    updated: UpdatedEngine

    def weight_receiver(self) -> VLLMReceiver:
        """The receiver that a sync to here fills."""
        return self.updated.receiver

    @returns("same")
    def takes_adapter(self) -> bool:
        """Whether a sync to here sends the LoRA adapter as such."""
        return self.updated.receiver.adapter_rank is not None

    @returns("local")
    def take_weights(self, version: int, temperature: float) -> Attempt:
        """Carry the weights that came into the engine, as ``UpdatedEngine.take``."""
        return self.updated.take(version, temperature)

    @returns("local")
    def prove_weights(self, scored: Mapping[tuple[int, ...], tuple[float, ...]]) -> Attempt:
        """Compare with the trainer's scores of the drawn tokens, as ``UpdatedEngine.prove``."""
        return self.updated.prove(scored)

    @returns("same")
    def weights_version(self) -> int:
        """The version of the proved weights in use."""
        return self.updated.version()


class ProvedRollout(TakesProvedWeights, Advancing, Generating, Conversing):
    """A rollout worker with an engine that proves its weights; ``InProcessRollout`` has the same methods."""

    _map: Through
    _folder: TemporaryFolder
    """Files that were written for the engine."""
    _close: Callable[[], object]
    """Ends the engine."""

    @returns("same")
    def weights_map(self) -> Through:
        """The map that weights go through on their way here: a cast, or codes and fresh scales."""
        return self._map

    @returns("local")
    def restart(self) -> None:
        """Start a fresh engine with the last proved weights. The rows of the one before are forgotten."""
        super().restart()
        self.updated.restart()

    def close(self) -> None:
        """End the engine, if it is ours, and remove the files that were written for it, copies of weights included."""
        self._close()
        self._folder.close()
        self.updated.receiver.copies.close()
