"""One update of an engine as a checklist: it happened and is proved, or it raised and the engine is to be replaced."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rl_bridge.rollout.vllm.client import EngineClient
from rl_bridge.rollout.vllm.copies import Copy
from rl_bridge.rollout.vllm.held import Held
from rl_bridge.rollout.vllm.probe import Drawn, Probe, Tolerance, check_drawn, check_scored
from rl_bridge.weights.manifest import Manifest, TensorSpec, compare
from rl_bridge.weights.peers import WeightSyncError

BUCKET_BYTES = 256 << 20


class UpdateFailed(WeightSyncError):
    """A step of an update failed. Unless it was the first one, the engine must be replaced."""


class WeightUpdate:
    """The checklist, in two halves: the engine takes a complete copy and draws; the trainer's scores are the proof.

    In between the engine is paused, so that nothing of unproved weights is given out.
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
        """Compare what was drawn with the trainer's log-probabilities of it, and let the engine go on.

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
    """Hold each of the engine's tensors against the copy that it was loaded from, but for ``blind``: those that this
    engine did not show, or not in a known order, when it had the checkpoint that it started from.

    Raises:
        UpdateFailed: a tensor is not what was sent, or is not shown any more.
    """
    held = client.held(copy.folder, copy.folder if copy.adapter else None)
    require_same(held, blind)


def require_same(held: Held, blind: Mapping[str, str]) -> None:
    """As ``compared``, of what the engine answered."""
    faults = [f"{name}: {what}" for name, what in (held.different | held.unread).items() if name not in blind]
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

    A layer is what has the same first number in its name.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in tensors:
        layers.setdefault(_layer(name), []).append(name)
    bucket: list[str] = []
    held = 0
    for names in layers.values():
        nbytes = sum(tensors[name].nbytes for name in names)
        if bucket and held + nbytes > size:
            yield bucket
            bucket, held = [], 0
        bucket += names
        held += nbytes
    if bucket:
        yield bucket


def _layer(name: str) -> tuple[str, str]:
    """What comes before the first number, and the number.

    >>> _layer("model.layers.3.mlp.experts.7.w1"), _layer("lm_head.weight")
    (('model.layers', '3'), ('lm_head.weight', ''))
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), part
    return name, ""
