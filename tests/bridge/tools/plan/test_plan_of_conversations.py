"""Plans of runs with an environment: rows are whole conversations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.vllm import VLLMOptions
from rl_tools.plan.plan_command import conversation_of, print_plan, workload_of
from rl_tools.plan.planning import Plan
from rl_tools.profile.live_bytes import Peak
from rl_train.policy_configs import quickstart
from rl_train.policy_options import PolicyPipeline

PROMPT, NEW = 20, 16


def pipeline(folder: Path, *, positions: int = 1000, **fields) -> PolicyPipeline:
    """A policy of a small Qwen2 with so many positions, and turns of 16 tokens."""
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=50, num_key_value_heads=2, max_position_embeddings=positions, **small)
    config.save_pretrained(folder)
    start = quickstart()
    sampling = replace(start.policy.sampling, max_new_tokens=NEW)
    policy = replace(start.policy, sampling=sampling)
    about = {"model": str(folder), "data": "rows.jsonl", "sft": replace(start.sft, steps=0), "policy": policy}
    return replace(start, **{**about, **fields})


# Options, the tokens of a row, and whether the environment's are among them.
TALKS = {
    "turns of the policy": ({"max_turns": 8}, PROMPT + 8 * NEW, False),
    "the default's turns": ({}, PROMPT + 4 * NEW, False),
    "one turn": ({"max_turns": 1}, PROMPT + NEW, False),
    "a limit above the turns": ({"max_turns": 2, "max_trajectory_tokens": 300}, 300, True),
    "a limit below the turns": ({"max_turns": 8, "max_trajectory_tokens": 60}, 60, True),
    "a limit below the prompt": ({"max_turns": 8, "max_trajectory_tokens": 15}, PROMPT + 1, True),
    "the model's positions": ({"max_turns": 8, "positions": 64}, 64, True),
    "positions of just the turns": ({"max_turns": 2, "positions": PROMPT + 2 * NEW}, PROMPT + 2 * NEW, True),
}


@pytest.mark.parametrize("talk", TALKS)
def test_rows_of_a_plan_are_whole_conversations(talk, tmp_path, monkeypatch, capsys):
    """They were one turn long: the micro-batch that a plan proposes was several times too small."""
    fields, row_tokens, with_environment = TALKS[talk]
    talking = pipeline(tmp_path, environment="talk.py:Talk", **fields)
    _, load = workload_of(talking, PROMPT, None)
    assert (load.prompt_tokens, load.row_tokens) == (PROMPT, row_tokens)
    monkeypatch.setattr("rl_tools.plan.plan_command.plan", lambda *_: Plan({"update": Peak(1, {}, "")}))
    numbers = print_plan(talking, PROMPT, None)[3]
    assert numbers["conversation"]["with_environment"] is with_environment
    assert numbers["workload"] == vars(load) and json.dumps(numbers)
    printed = capsys.readouterr().out
    assert ("the environment's included" in printed) is with_environment
    assert ("what the environment says is not counted" in printed) is not with_environment


def test_a_run_without_an_environment_has_rows_of_one_turn(tmp_path):
    alone = pipeline(tmp_path)
    source, load = workload_of(alone, PROMPT, None)
    assert load.row_tokens == PROMPT + NEW and conversation_of(alone, source, PROMPT) is None


def test_an_engine_that_holds_less_bounds_the_conversations(tmp_path):
    rollout = RolloutOptions(backend="vllm", vllm=VLLMOptions(max_model_len=50))
    talking = pipeline(tmp_path, environment="talk.py:Talk", max_turns=8, rollout=rollout)
    assert workload_of(talking, PROMPT, None)[1].row_tokens == 50


def test_conversations_that_a_run_refuses_have_no_plan(tmp_path):
    talking = pipeline(tmp_path, environment="talk.py:Talk", max_trajectory_tokens=200, positions=64)
    with pytest.raises(ValueError, match=r"conversations of 200 tokens .* are longer than the engine holds, 64"):
        workload_of(talking, PROMPT, None)
