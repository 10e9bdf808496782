"""Gather runs of experiments/grpo_jax.py into this folder: python experiments/results/grpo_jax/collect.py RUN…"""

import json
import sys
from pathlib import Path

from experiments.flax_qwen2.run_folder import learning_curve
from rl_bridge.common.files import replacing, write_json

KEPT = ("seed", "accuracy_before", "accuracy_after", "seconds", "cpu_seconds")


def main(folders: list[Path]) -> None:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    shared = {k: v for k, v in summaries[0].items() if k not in KEPT}
    for summary in summaries:
        # One table stands for one configuration: only the seed and the name may differ.
        for name in ("seed", "name"):
            summary["config"].pop(name, None)
        if any(summary[name] != value for name, value in shared.items()):
            raise ValueError(f"the runs differ in more than the seed: {[str(folder) for folder in folders]}")
    here = Path(__file__).parent
    runs = {folder.name: (folder / "metrics.jsonl").read_text().splitlines() for folder in folders}
    with replacing(here / "learning_curve.png") as temporary:
        figure = learning_curve({name: [json.loads(line) for line in lines] for name, lines in runs.items()})
        figure.savefig(temporary, format="png", dpi=100)
    write_json(here / "summary.json", {"seeds": [{k: s[k] for k in KEPT} for s in summaries], **shared})


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
