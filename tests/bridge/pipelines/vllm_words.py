"""The quickstart's words with an engine of vLLM, as fixtures."""

import pytest

from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from tests.bridge.pipelines.conftest import words_of
from tests.bridge.pipelines.processes import REWARD, SHORT

ENGINE = {"--rollout.backend": "vllm", "--rollout.vllm.kv-cache-gib": 0.02, "--rollout.vllm.max-num-seqs": 16}
TRUNCATED = {"--policy.sampling.top-k": 12, "--policy.sampling.top-p": 0.95, "--policy.sampling.min-p": 0.02}


def model_of(folder, heads):
    """Heads of 32 are the smallest that vLLM computes on a CPU."""
    tokenizer = character_tokenizer("0123456789+-=")
    save_pretrained(folder, tiny_qwen2(tokenizer, hidden=32 * heads, layers=1, heads=heads), tokenizer)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("models") / "tiny", heads=1)


@pytest.fixture
def words(tmp_path, model_folder):
    (tmp_path / "reward.py").write_text(REWARD)

    def of(name, *more, **others):
        options = {**SHORT, **ENGINE, "--data": None, "--reward": f"{tmp_path / 'reward.py'}:even_digits", **others}
        return words_of(tmp_path, model_folder, name, "objective:grpo", *more, **options)[2:]

    return of
