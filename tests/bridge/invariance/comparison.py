"""Runs the scenario under each executor and compares every case with one worker, padded rows, one micro-batch."""

import pickle

import torch

from tests.bridge.invariance.scenario import Case
from tests.support import warm

PARTS = ("loss and metrics", "gradients", "gradient norm", "log-probabilities", "after an update")


def results(executor, folder, extent):
    """Every case of an executor, from a process (or two ranks) of its own."""
    output = folder / f"{executor}.pickle"
    module = ["-m", "tests.bridge.invariance.scenario", executor, str(output), extent]
    done = warm.run(*module, count=2 if executor == "torchrun" else 0, timeout=1500)
    if done.returncode:
        raise RuntimeError(f"{executor} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return pickle.loads(output.read_bytes())


def differences(case, found, expected):
    """Largest difference of each part: of gradients and log-probabilities absolute, of numbers relative above 1."""
    gradient = max(
        float((found["gradients"][name] - value).abs().max()) for name, value in expected["gradients"].items()
    )
    assert found["gradients"].keys() == expected["gradients"].keys(), case
    logprobs = float((found["log-probabilities"] - expected["log-probabilities"]).abs().max())
    return dict(
        zip(
            PARTS,
            (
                apart(found["first step"], expected["first step"]),
                gradient,
                apart(found["update"], expected["update"]),
                logprobs,
                apart(found["second step"], expected["second step"]),
            ),
            strict=True,
        )
    )


def apart(found, expected):
    """Largest difference of numbers in dictionaries, relative where they are above 1."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    worst = 0.0
    for name, value in expected.items():
        pairs = zip(found[name], value, strict=True) if isinstance(value, list) else [(found[name], value)]
        worst = max(worst, *(abs(a - b) / max(1.0, abs(b)) for a, b in pairs))
    return worst


def baseline(case):
    """One worker, padded rows, one micro-batch."""
    return Case(case.trainer, "1", "padded", 1)


def largest_gradient(results_of_one):
    return max(float(value.abs().max()) for value in results_of_one["gradients"].values())


def all_finite(result):
    return all(bool(torch.isfinite(value).all()) for value in result["gradients"].values())
