import functools
import json
from pathlib import Path

import pytest

from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_tools.cli import main

OPTIONS = {
    # The quickstart's: those of a user's model are for larger ones.
    "--policy.sampling.max-new-tokens": 5,
    "--policy.updates-per-step": 2,
    "--optimizer.learning-rate": 1.5e-4,
    "--optimizer.decay": "linear",
    "--optimizer.final": 0.2,
    "--optimizer.beta2": 0.99,
    "--sft.optimizer.learning-rate": 2e-3,
    "--sft.optimizer.warmup": 50,
    "--sft.optimizer.decay": "constant",
    "--sft.optimizer.beta2": 0.99,
    "--sft.steps": 6,
    "--sft.rows-per-step": 16,
    "--policy.steps": 8,
    "--policy.prompts-per-step": 4,
    "--policy.sampling.n": 4,
    "--policy.evaluate-every": 4,
    "--checkpoint-every": 3,
    "--held-out": 20,
    "--samples-every": 2,
    "--threads": 1,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A model small enough for a whole run to take seconds."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = character_tokenizer("0123456789+-=")
    save_pretrained(folder, tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    return folder


def problems(model_folder):
    """A file beside the model with a twentieth of two-digit addition: checking all of it takes longer than a run."""
    file = Path(model_folder).with_name("problems.jsonl")
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in arithmetic_rows(["+"])[::20]))
    return file


def words_of(folder, model_folder, name, *more, **changes):
    """The words of a command: ``OPTIONS``, into ``folder``, with what is given here on top, the algorithm first.

    An option that is None is left out: ``--data`` None takes all of two-digit addition.
    """
    data = {} if "--data" in changes else {"--data": problems(model_folder)}
    options = {**OPTIONS, "--output": folder, "--model": model_folder, "--name": name, **data, **changes}
    options = {name: value for name, value in options.items() if value is not None}
    algorithm = [word for word in more if word.startswith("objective:")]
    rest = [word for word in more if word not in algorithm]
    return ["train", "policy", *algorithm, *(str(word) for pair in options.items() for word in pair), *rest]


@pytest.fixture
def arguments(tmp_path, model_folder):
    """``words_of`` a command that writes into ``tmp_path``."""
    return functools.partial(words_of, tmp_path, model_folder)


@pytest.fixture
def run_to_end(tmp_path):
    """Run a command in this process; its folder."""

    def run(words):
        assert main(words) == 0
        return tmp_path / words[words.index("--name") + 1]

    return run
