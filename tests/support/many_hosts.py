"""Several slots without processes: what an engine does with an executor of more than one worker."""

from concurrent.futures import Future

from rl_bridge.executors import Slot
from rl_bridge.executors.host import Host


class Single(Host):
    """A host whose workers need no process group."""

    def group(self, slots, backend=None, *, purpose=""):
        return None


class ManyHosts:
    name = "many"

    def __init__(self, slots, nodes=("a",)):
        per_node = -(-slots // len(nodes))
        self.slots = tuple(Slot(i, node=nodes[i // per_node], resources={"CPU": 1.0}) for i in range(slots))
        self.hosts = [Single(i) for i in range(slots)]
        self.held = {}
        self.sent = []

    def together(self, slots):
        return None

    def submit(self, function, arguments, *, what, timeout=None, together=None):
        future = Future()
        try:
            future.set_result(self.call(function, arguments, what=what, timeout=timeout))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, function, arguments, *, what, timeout=None, together=None):
        self.sent.append((what, arguments))
        return {slot: function(self.hosts[slot], *given) for slot, given in arguments.items()}

    def dead(self):
        return {}

    def stop(self):
        pass
