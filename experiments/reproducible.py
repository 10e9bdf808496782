"""The same run again, killed and resumed, and on two ranks: how far its weights and metrics differ, step by step.

python experiments/reproducible.py --workers 4    # writes experiments/results/reproducible/

SFT, GRPO and PPO with a critic run on the command line, on addition below 32 by a small Qwen2. `again` is the same
command a second time. `killed` is ended by SIGKILL at random steps and goes on with --resume. `2 ranks` is the same
command under torchrun, with the model in two shards. `nudged` is one process that begins with every weight one float32
further: how far rounding alone drives two runs apart. Each is compared with the first run: every tensor of every
checkpoint (weights and optimiser), and every number of every record but the times.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from experiments.policy_runs import ROWS, save
from rl_bridge.checkpoints.writing import piece_name
from rl_bridge.common.files import write_json
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.run.records import read_records

RESULTS, RUNS = Path(__file__).parent / "results" / "reproducible", Path("runs") / "reproducible"
OF_A_SESSION = {"stage", "step", "seconds", "tokens_per_second", "run", "attempt", "time"}
WAYS = ("again", "killed", "2 ranks", "nudged")
POLICY = ["--sft.steps", "0", "--policy.prompts-per-step", "16", "--policy.sampling.n", "8"]
POLICY += ["--policy.updates-per-step", "2", "--policy.sampling.max-new-tokens", "4", "--policy.evaluate-every", "10"]
POLICY += ["--optimizer.decay", "linear", "--optimizer.final", "0.2", "--optimizer.beta2", "0.99"]
POLICY += ["--optimizer.learning-rate", "5e-4", "--optimizer.warmup", "5", "--objective.kl.coef", "0.01"]
COMMANDS = {
    "SFT": ["sft", "--rows-per-step", "64", "--optimizer.learning-rate", "3e-3", "--optimizer.warmup", "20"],
    "GRPO": ["policy", "objective:grpo", *POLICY],
    "PPO": ["policy", "objective:ppo", *POLICY, "--critic.optimizer.learning-rate", "2e-3"],
}


def words(algorithm: str, way: str, seed: int, steps: int, folder: Path) -> list[str]:
    """Of the command line. Reinforcement learning begins with what the first run of SFT made."""
    trainer, *more = COMMANDS[algorithm]
    model = folder / "model" if trainer == "sft" else folder / f"SFT-first-{seed}" / "model"
    if way == "nudged":
        model = nudged(model, folder / f"{algorithm}-start-{seed}")
    # Supervision is cheap, and has to come so far that some completions are right.
    count = 5 * steps if trainer == "sft" else steps
    return [
        *["train", trainer, *more, f"--{trainer}.steps", str(count), "--model", str(model), "--seed", str(seed)],
        *["--data", str(folder / "rows.jsonl"), "--held-out", "100", "--threads", "1"],
        *["--name", f"{algorithm}-{way}-{seed}", "--output", str(folder)],
        *["--checkpoint-every", str(max(1, count // 20)), "--keep-checkpoints", "1000"],
    ]


def nudged(model: Path, to: Path) -> Path:
    """A copy of the model whose every weight is the next larger float32."""
    shutil.copytree(model, to, dirs_exist_ok=True)
    tensors = {name: torch.nextafter(x, x + 1) for name, x in load_file(model / "model.safetensors").items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def start(arguments: Sequence[str], ranks: int, log: Path) -> subprocess.Popen:
    """The command in a session of its own."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    with log.open("a") as out:
        return subprocess.Popen(
            [sys.executable, *launch, "-m", "rl_tools.cli", *arguments],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen, log: Path) -> None:
    """Wait for its good end."""
    if process.wait(timeout=1800):
        raise RuntimeError(f"status {process.returncode}, the end of {log}:\n{log.read_text()[-3000:]}")


def lines(folder: Path) -> int:
    """Records that a run has written."""
    record = folder / "metrics.jsonl"
    return len(record.read_bytes().splitlines()) if record.exists() else 0


def killed(arguments: list[str], at: Sequence[int], pauses: Sequence[float], folder: Path, log: Path) -> None:
    """The run to its end, with a SIGKILL as soon as it has made each of the steps ``at``, and a pause."""
    resume: list[str] = []
    for step, pause in zip(at, pauses, strict=True):
        process = start([*arguments, *resume], 1, log)
        while lines(folder) < step:
            if process.poll() is not None:
                raise RuntimeError(f"ended by itself before step {step}: {log.read_text()[-3000:]}")
            time.sleep(0.002)
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"was to be killed at step {step}, ended with {process.returncode}")
        resume = ["--resume"]
    finish(start([*arguments, *resume], 1, log), log)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, put together of the ranks' pieces."""
    found = {}
    for index in sorted(checkpoint.glob("*/index.json")):
        for name, tensor in json.loads(index.read_text("utf-8"))["tensors"].items():
            whole = torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
            for piece in tensor["pieces"]:
                place = tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["sizes"], strict=True))
                with safe_open(checkpoint / piece["file"], "pt") as reader:
                    whole[place] = reader.get_tensor(piece_name(MetadataIndex(name, torch.Size(piece["offsets"]))))
            found[f"{index.parent.name}/{name}"] = whole
    return found


def compare(run: Path, first: Path) -> dict[str, Any]:
    """Per step the largest difference of a weight and of a number of the record; and whether all is equal, bit for bit.

    Raises:
        ValueError: the runs have other steps or other names.
    """
    records, wanted = (read_records(folder / "metrics.jsonl") for folder in (run, first))
    made = [sorted(path.name for path in (folder / "checkpoints").glob("step-*")) for folder in (run, first)]
    if made[0] != made[1] or [set(r) for r in records] != [set(r) for r in wanted]:
        raise ValueError(f"{run} and {first} have not the same checkpoints and records")
    numbers, worst = [], ("", 0.0)
    for a, b in zip(records, wanted, strict=True):
        apart = {name: abs(a[name] - b[name]) for name in a.keys() - OF_A_SESSION}
        numbers.append(max(apart.values()))
        worst = max(worst, max(apart.items(), key=lambda item: item[1]), key=lambda item: item[1])
    weights, equal = [], True
    for name in made[0]:
        found, expected = (tensors(folder / "checkpoints" / name) for folder in (run, first))
        equal &= found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
        ours = [key for key in found if key.split("/")[1] == "model"]
        weights.append(max(float((found[key] - expected[key]).abs().max()) for key in ours))
    return {
        "weights": {"steps": [int(name.removeprefix("step-")) for name in made[0]], "differences": weights},
        "metrics": {"steps": [record["step"] + 1 for record in wanted], "differences": numbers},
        "all_tensors_equal": equal,
        "largest_in_metric": worst[0],
    }


def run_all(algorithm: str, seed: int, steps: int, folder: Path, kills: int) -> dict[str, Any]:
    """The first run of an algorithm and the three others, each compared with it."""
    found: dict[str, Any] = {}
    for way in ("first", *WAYS):
        arguments = words(algorithm, way, seed, steps, folder)
        run = folder / f"{algorithm}-{way}-{seed}"
        log = folder / f"{run.name}.log"
        count = 5 * steps if algorithm == "SFT" else steps
        draw = random.Random(f"{algorithm} {seed}")
        at = sorted(draw.sample(range(1, count), kills))
        pauses = [draw.uniform(0.0, 0.1) for _ in at]
        if not (run / "summary.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            if way == "killed":
                killed(arguments, at, pauses, run, log)
            else:
                finish(start(arguments, 2 if way == "2 ranks" else 1, log), log)
        if way != "first":
            found[way] = compare(run, folder / f"{algorithm}-first-{seed}")
            if way == "killed":
                found[way]["killed_after_steps"] = at
    print(algorithm, seed, {way: max(of["weights"]["differences"]) for way, of in found.items()}, flush=True)
    return found


def draw(found: dict[str, dict[str, Any]], folder: Path) -> None:
    """Differences by step: mean of the seeds, band from least to most; 0 has its own place on the axis."""
    figure = Figure(figsize=(15, 7), layout="constrained")
    axes = figure.subplots(2, len(COMMANDS), sharey="row")
    for column, algorithm in enumerate(COMMANDS):
        for row, what in enumerate(("weights", "metrics")):
            axis, least = axes[row][column], (1e-9, 1e-7)[row]
            for i, way in enumerate(WAYS):
                of = [seed[way][what] for seed in found[algorithm].values()]
                values = np.array([one["differences"] for one in of])
                style = {"color": f"C{i}", "label": way, "linestyle": ("-", "--", "-", ":")[i]}
                axis.plot(of[0]["steps"], values.mean(0), **style)
                axis.fill_between(of[0]["steps"], values.min(0), values.max(0), color=f"C{i}", alpha=0.2, linewidth=0)
            axis.set_yscale("symlog", linthresh=least)
            axis.set(xlabel="step", title=f"{algorithm}: largest difference of {what}")
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    save(figure, folder / "differences.png")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time; one on two ranks takes two")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=RUNS, help="runs that are there are not made again")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    folder = arguments.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    tokenizer = character_tokenizer("0123456789+=")
    tiny_qwen2(tokenizer, hidden=64, layers=2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    seeds = range(arguments.seeds)
    found: dict[str, dict[str, Any]] = {name: {} for name in COMMANDS}
    with ThreadPoolExecutor(arguments.workers) as pool:
        # Reinforcement learning begins with the models that SFT makes.
        for names in (["SFT"], [name for name in COMMANDS if name != "SFT"]):
            jobs = {
                (name, seed): pool.submit(run_all, name, seed, arguments.steps, folder, arguments.kills)
                for seed in seeds
                for name in names
            }
            for (name, seed), job in jobs.items():
                found[name][str(seed)] = job.result()
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(found, arguments.output)
    for seeds_of in found.values():
        for ways in seeds_of.values():
            for one in ways.values():
                for what in ("weights", "metrics"):
                    one[what] = {key: " ".join(f"{x:.3g}" for x in values) for key, values in one[what].items()}
    commands = {name: " ".join(["rl-fn", *words(name, "first", 0, arguments.steps, RUNS)]) for name in COMMANDS}
    settings = {"steps": arguments.steps, "kills": arguments.kills, "commands": commands}
    write_json(arguments.output / "summary.json", {**settings, "runs": found})


if __name__ == "__main__":
    main()
