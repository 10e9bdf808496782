"""Folders of runs as a report reads them, made without a run."""

import json
import math
import random

from rl_bridge.run.provenance import HELD_OUT, UNDIVIDED, with_evaluation
from rl_tools.tune.journal import Journal

NAUGHTY = '</script><script>document.title="broken"</script><!-- \u202eleft\u2066\u0000\u001b[31m\u2028 & <b>'
TOKENS = ("4", "2", "</script>", "\u202e", "\n", "")


def record(step, stage="policy", **more):
    return {
        "stage": stage,
        "step": step,
        "seconds": 0.5 * (step + 1),
        "trained_tokens": 100,
        "weights_version": step + 1,
        "run": "run",
        "attempt": 1,
        "time": 1.7e9 + step,
        **more,
    }


def sample(step, text=TOKENS, **more):
    count = len(text)
    columns = {name: [-0.25 * (i + 1) for i in range(count)] for name in ("logprob", "old_logprob", "rollout_logprob")}
    columns |= {"ratio": [1.0 + 0.125 * i for i in range(count)], "advantage": [(-1.0) ** step * 1.5] * count}
    columns |= {"entropy": [0.5] * count, "id": list(range(7, 7 + count)), "place": list(range(3, 3 + count))}
    columns |= {"text": list(text), "counted": [True] * count, "version": [step] * count}
    about = {"row": 0, "group": 0, "reward": 1.0, "rewards": {"right": 1.0}, "finish_reason": "stop", "left_out": 0}
    return {**about, "prompt": NAUGHTY, "completion": "".join(text), "tokens": columns, **more}


def write_run(folder, *, steps=40, seed=0, shift=0.0, config=None, finished=True, noise=0.02, fingerprints=None):
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    records = []
    for step in range(steps):
        reward = shift + 1 - math.exp(-step / steps * 3) + draw.gauss(0, noise)
        metrics = {
            "reward": reward,
            "kl": 0.01 * step,
            "entropy": 2 - reward,
            "clip_fraction": abs(draw.gauss(0, 0.01)),
        }
        if (step + 1) % 10 == 0:
            metrics |= {"held_out": reward, "held_out_low": reward - 0.1, "held_out_high": reward + 0.1}
        records.append(record(step, **metrics))
    options = {"name": folder.name, "seed": seed, "optimizer": {"learning_rate": 1e-4}}
    options |= {"objective": {"algorithm": "dapo", "clip_low": 0.2, "kl": {"coef": None}}, "title": NAUGHTY}
    (folder / "config.json").write_text(json.dumps(options | (config or {})), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", records)
    lines = [{"step": step, "samples": [sample(step), sample(step, ("1",))]} for step in range(0, steps, 10)]
    write_lines(folder / "completions.jsonl", lines)
    row = {"prompt": NAUGHTY, "completion": "42", "answer": "42", "reward": 1.0}
    (folder / "samples.json").write_text(json.dumps({"before": {"greedy": [row]}, "after": {"greedy": [row]}}))
    inputs = {"data": f"of seed {seed}", UNDIVIDED: "r1", "reward": "w1", HELD_OUT: f"of seed {seed}"}
    inputs = with_evaluation(inputs, seed=seed) | (fingerprints or {})
    write_lines(folder / "provenance.jsonl", [{"attempt": 1, "time": 1.7e9, "fingerprints": inputs}])
    if finished:
        summary = {"accuracy_before": 0.5, "accuracy_after": 0.9, "objective": "dapo: minimise ℓ\n  ℓ = −min(ρA, x)"}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def memory_lines(steps):
    """An update with one MiB of weights and 2, 3, 4 … of activations, a sync with one, and the end of each step."""
    mib, lines = 2**20, []
    for step in range(steps):
        for phase, most in (("update", 2 + step), ("sync", 1)):
            parts = {"weights": mib, "activations": most * mib}
            timeline = [[0.0, {"weights": mib}], [0.25, parts]]
            call = {"phase": phase, "call": "train_step", "seconds": 0.5, "peak": (1 + most) * mib, "components": parts}
            lines.append({"time": 1.0, "step": step, **call, "timeline": timeline, "line": f"policy.py:7 {NAUGHTY}"})
        lines.append({"time": 2.0, "step": step, "end_of_step": True, "bytes": mib, "rss": 9 * mib})
    return lines


def write_study(folder, *, trials=12, goals=1):
    """A study of a log range and a choice that applies to every other trial; trial 3 crashed, the last one runs."""
    folder.mkdir(parents=True)
    named = [{"name": "reward", "maximize": True}, {"name": "kl", "maximize": False}][:goals]
    space = [
        {
            "name": "optimizer.learning_rate",
            "domain": {"kind": "Interval", "low": 1e-5, "high": 1e-1, "log": True, "whole": False},
        },
        {"name": "clip", "domain": {"kind": "Choice", "values": ["low", NAUGHTY]}},
    ]
    journal = Journal(folder / "journal.jsonl", len(named))
    journal.append({"kind": "study", "space": space, "goals": named})
    draw = random.Random(0)
    for trial in range(trials):
        assignment = {"optimizer.learning_rate": 10 ** draw.uniform(-5, -1)}
        assignment |= {"clip": "low" if trial % 4 else NAUGHTY} if trial % 2 == 0 else {}
        journal.append({"kind": "asked", "trial": trial, "assignment": assignment})
        if trial == trials - 1:
            break
        told = {"kind": "told", "trial": trial, "status": "complete", "reason": "", "violations": [0.0]}
        mean = draw.random()
        low, high = mean - 0.1, mean + 0.1
        interval = {"mean": mean, "low": low, "high": high, "level": 0.95, "seeds": [low, high]}
        told["values"] = {goal["name"]: interval for goal in named}
        if trial == 3:
            told |= {"status": "failed", "reason": f"it crashed: {NAUGHTY}", "values": {}}
        journal.append(told)
    return folder


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
