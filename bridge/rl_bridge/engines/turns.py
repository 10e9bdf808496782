"""Engines that share devices and take turns: who does not work waits in host memory."""

from rl_bridge.engines.base import Engine


class Turns:
    """An engine that is called comes to its devices with all that moves, and those that worked before leave theirs.

    The devices then hold one engine at a time, or the two of a weight sync. Each change costs copies over the bus.
    Without an accelerator everything is in host memory already, and nothing moves.
    """

    def __init__(self) -> None:
        self._working: tuple[Engine, ...] = ()

    def add(self, engine: Engine) -> None:
        """Let a built engine take turns with the others; until its first call it waits."""
        if all(slot.device.startswith("cuda") for slot in engine.executor.slots if slot.index in engine.slots):
            engine.cpu()
            engine.before_call = self.take

    def take(self, *engines: Engine) -> None:
        """Bring these engines to their devices, once those that worked before have left."""
        for engine in self._working:
            if engine not in engines and engine.slots:
                engine.cpu()
        for engine in engines:
            if engine not in self._working:
                engine.cuda()
        self._working = engines
