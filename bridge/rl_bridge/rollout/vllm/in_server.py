"""What a server's worker does for this package besides drawing: the worker class of vLLM gets these methods.

A worker that cannot import this file does not start, and with it the server.
"""

from typing import Any

from rl_bridge.rollout.vllm.draws import Draws
from rl_bridge.rollout.vllm.plugin import in_place

EXTENSION = f"{__name__}.InServer"
"""For ``--worker-extension-cls``."""


class InServer:
    """Methods for ``collective_rpc``; their results are JSON."""

    model_runner: Any
    _rl_fn_draws: Draws

    def rl_fn_begin(self) -> dict[str, Any]:
        """Let draws depend on the request alone, as in a worker's own engine; what is in place in this process."""
        self._rl_fn_draws = Draws()
        self._rl_fn_draws.attach_to(self.model_runner)
        return in_place(self)

    def rl_fn_allowed(self, name: str, count: int) -> list[list[int]]:
        """The ids that were allowed at each of a finished request's ``count`` draws, which are forgotten here."""
        return [ids.tolist() for ids in self._rl_fn_draws.take_allowed(name, count)]
