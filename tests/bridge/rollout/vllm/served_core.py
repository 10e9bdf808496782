"""The model in the process of a served engine, and its log-probabilities."""

import os
from pathlib import Path

import numpy as np
import torch

from tests.bridge.rollout.distribution import truncated


def full_forward(model, t, sampling):
    """Log-probabilities of the drawn tokens, and which tokens truncation allows there, by our own arithmetic."""
    logits = model(input_ids=torch.tensor([t.tokens]), use_cache=False).logits[0]
    cuts = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    found = []
    for place, drawn in enumerate(t.loss_mask):
        if drawn:
            p = truncated(logits[place - 1], **cuts)
            found.append((float(np.log(p[t.tokens[place]])), np.flatnonzero(p).tolist()))
    return found


def core_of(process):
    """The process in which vLLM computes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.getpgid(int(folder.name)) == os.getpgid(process.pid)
                and "EngineCore" in (folder / "cmdline").read_text()
            ):
                return int(folder.name)
        except (ProcessLookupError, FileNotFoundError):
            continue
    raise AssertionError("vLLM's server has no engine process")
