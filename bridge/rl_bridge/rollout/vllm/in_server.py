"""What a server's worker does for this package besides drawing: the worker class of vLLM gets these methods.

A worker that cannot import this file does not start, and with it the server.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

from rl_bridge.rollout.vllm.draws import Draws
from rl_bridge.rollout.vllm.held import held_by
from rl_bridge.rollout.vllm.plugin import in_place

EXTENSION = f"{__name__}.InServer"
"""For ``--worker-extension-cls``."""


class InServer:
    """Methods for ``collective_rpc``; their results are JSON."""

    model_runner: Any
    list_loras: Callable[[], set[int]]
    add_lora: Callable[[Any], bool]
    _rl_fn_draws: Draws

    def rl_fn_begin(self) -> dict[str, Any]:
        """Let draws depend on the request alone, as in a worker's own engine; what is in place in this process."""
        self._rl_fn_draws = Draws()
        self._rl_fn_draws.attach_to(self.model_runner)
        return in_place(self)

    def rl_fn_adopt(self, folder: str) -> list[int]:
        """The adapter in ``folder`` in the place of the one before; the numbers of all that are here.

        vLLM's own path for it keeps ``load_inplace`` in every later request: each would load its file again.
        """
        from vllm.lora.request import LoRARequest

        [number] = self.list_loras()
        self.add_lora(LoRARequest("rl_fn", number, folder, load_inplace=True))
        return sorted(self.list_loras())

    def rl_fn_held(self, folder: str, adapter: str | None) -> list[Any]:
        """What this worker holds, compared with the weights, or the adapter, in a folder."""
        return held_by(self, folder, adapter)

    def rl_fn_allowed(self, name: str, count: int) -> list[list[int]]:
        """The ids that were allowed at each of a finished request's ``count`` draws, which are forgotten here."""
        return [ids.tolist() for ids in self._rl_fn_draws.take_allowed(name, count)]

    def rl_fn_noted(self, names: list[str]) -> dict[str, list[list[int]]]:
        """All that is noted of these requests, where something is; it is forgotten here."""
        noted = {name: self._rl_fn_draws.take_noted(name) for name in names}
        return {name: [ids.tolist() for ids in rows] for name, rows in noted.items() if rows}
