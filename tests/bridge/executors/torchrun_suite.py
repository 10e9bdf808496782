"""Runs every scenario in a torchrun job: torchrun -m tests.bridge.executors.torchrun_suite RESULT.json"""

import json
import sys
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.executors import calls, channel
from tests.bridge.executors.scenarios import outcomes

if __name__ == "__main__":
    torch.set_num_threads(1)
    channel._HANDSHAKE_SECONDS = 1  # every timeout is shorter than the scenario that idles
    calls.PATIENCE = 0.5
    executor = rl_bridge.init()
    found = outcomes(executor) | {"name": executor.name, "slots": len(executor.slots)}
    Path(sys.argv[1]).write_text(json.dumps(found))
