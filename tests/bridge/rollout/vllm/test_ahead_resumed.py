"""A whole run whose rollouts go on across updates on vLLM: the same twice, also where it was killed in between."""

import pytest

from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.modules.trainable import CausalLMModule
from rl_tools.cli import main
from tests.support.results import assert_same, result

pytestmark = pytest.mark.vllm
OPTIONS = {
    "--rollout.backend": "vllm",
    "--rollout.vllm.max-model-len": 64,
    "--rollout.vllm.max-num-seqs": 16,
    "--asynchronous.max-staleness": 2,
    "--asynchronous.tokens-beside": 4,
    "--asynchronous.round-tokens": 2,
    "--sft.steps": 1,
    "--sft.rows-per-step": 8,
    "--policy.steps": 5,
    "--policy.prompts-per-step": 4,
    "--policy.sampling.n": 4,
    "--policy.updates-per-step": 1,
    "--policy.sampling.max-new-tokens": 12,
    "--policy.evaluate-every": 5,
    "--checkpoint-every": 3,
    "--held-out": 8,
    "--threads": 1,
}
REWARD = "def even_digits(completion, row):\n    return sum(c in '02468' for c in completion) + 0.1 * len(completion)\n"


class Killed(BaseException):
    """Nothing of the run's own code handles it."""


def test_killed_with_requests_in_the_engine_it_ends_as_if_it_had_not_been(tmp_path, model, tokenizer, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    save_pretrained(tmp_path / "model", model, tokenizer)
    options = OPTIONS | {"--reward": f"{tmp_path / 'reward.py'}:even_digits", "--model": tmp_path / "model"}

    def words(name):
        given = options | {"--output": tmp_path, "--name": name}
        return ["train", "policy", *(str(word) for pair in given.items() for word in pair), "--asynchronous.partial"]

    assert main(words("whole")) == 0
    whole = result(tmp_path / "whole")
    assert any(record.get("versions_per_completion", 0) > 1 for record in whole["metrics"])

    update = CausalLMModule.optimizer_step

    def dying(self):
        if self.weights_version() == 1 + 3:
            raise Killed
        return update(self)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CausalLMModule, "optimizer_step", dying)
        main(words("killed"))
    assert main([*words("killed"), "--resume"]) == 0
    assert_same(result(tmp_path / "killed"), whole)
