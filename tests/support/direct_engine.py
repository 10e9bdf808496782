"""An engine without workers."""

from rl_bridge.engines import NeedParallel


class Direct:
    """The engine of one module, without workers: arguments arrive as they are."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        method = getattr(self.module, name)
        return lambda *arguments: method(*(x.data if isinstance(x, NeedParallel) else x for x in arguments))
