"""A trained reward model as a reward: a folder of transformers' own format."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rl_bridge.common.terminal import remarks
from rl_bridge.models.small import character_tokenizer
from rl_bridge.rewards import RewardError, load
from rl_bridge.rewards.scoring_models import RewardModel
from tests.support.chat_templates import CHATML, bytes_tokenizer
from tests.support.reward_batches import trajectories, values


def made(folder, tokenizer, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        **{"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id} | options,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["plain", "chatml", "gemma"])
def test_the_scores_are_those_of_transformers_on_the_template_s_tokens(tmp_path, kind):
    tokenizer = character_tokenizer("0123456789+-=") if kind == "plain" else bytes_tokenizer(kind)
    folder = made(tmp_path, tokenizer)
    found = values(load(f"model:{folder}"), "12", "", "3456")
    reference = AutoModelForSequenceClassification.from_pretrained(folder)
    for trajectory, value in zip(trajectories("12", "", "3456"), found, strict=True):
        if kind == "plain":
            tokens = [*tokenizer(trajectory.row["prompt"] + trajectory.completion).input_ids, tokenizer.eos_token_id]
        else:
            tokens = tokenizer.apply_chat_template([dict(m) for m in trajectory.messages], return_dict=False)
        with torch.no_grad():
            wanted = reference(torch.tensor([tokens])).logits[0, 0]
        torch.testing.assert_close(torch.tensor(value), wanted, rtol=1e-5, atol=1e-5)
    assert len(set(found)) == 3


ASKED, SAID = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
LEFT_OUT = {
    "a role": (
        CHATML.replace("in messages %}", "in messages if m.role != 'system' %}", 1),
        [{"role": "system", "content": "Be brief."}, ASKED, SAID],
        "leaves out 8 characters of what system says in 1 of 1 rows: first a, row 1, 'Bebrief.'",
    ),
    "thoughts": (
        CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
        [ASKED, SAID | {"content": "<think>so</think>2"}],
        "leaves out 17 characters of what assistant says in 1 of 1 rows: first a, row 1, '<think>so</think>'",
    ),
    "a key": (
        CHATML,
        [ASKED | {"name": "Ann"}, SAID],
        "message key `name` is not read by the reward model {}: it changes no token of 1 rows that have it",
    ),
    "tools": (CHATML, [ASKED, SAID], "row key `tools` is not read by the reward model {}: it changes no token of 1"),
    "nothing": (CHATML, [{"role": "system", "content": "Be brief."}, ASKED, SAID], None),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_less_than_the_policy_s_conversation_is_read_and_named_once(tmp_path, case):
    """The number stays that of transformers on the template's tokens."""
    template, messages, words = LEFT_OUT[case]
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = template
    folder = made(tmp_path, tokenizer)
    model = RewardModel(folder)
    row = {"prompt": messages[:-1], "_where": "a, row 1"}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    (trajectory,) = trajectories("2")
    tools = (schema,) if case == "tools" else ()
    trajectory = dataclasses.replace(trajectory, messages=tuple(messages), row=row, tools=tools)
    remarks()
    numbers = [model([trajectory])[0] for _ in range(2)]
    named = remarks()
    assert len(named) == (0 if words is None else 1) and (words or "").format(repr(folder)) in "".join(named)
    tokens = tokenizer.apply_chat_template([dict(m) for m in messages], return_dict=False)
    with torch.no_grad():
        expected = AutoModelForSequenceClassification.from_pretrained(folder)(torch.tensor([tokens])).logits[0, 0]
    assert numbers == pytest.approx([expected.item()] * 2, rel=1e-5)


def test_the_tokens_of_the_policy_do_not_matter(tmp_path):
    folder = made(tmp_path, character_tokenizer("0123456789+-="))
    rewards = load([f"model:{folder}", "exact"])
    assert rewards.names == ("reward_model", "exact")
    rewards.try_on([{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(RewardError, match=r"row 2 failed: the reward model .* cannot read the conversation: .* 'bad'"):
        rewards.score(trajectories("1", "bad"))
    rewards.close()
    assert len(rewards.score(trajectories("1"))) == 1


@pytest.mark.parametrize("how", ["labels", "missing", "absent"])
def test_what_is_no_reward_model_is_refused_at_once(tmp_path, how):
    folder = made(tmp_path / "model", character_tokenizer("01"), **({"num_labels": 2} if how == "labels" else {}))
    message = {
        "labels": "a value model has one label",
        "missing": r"'score\.weight'",
        "absent": "no model can be",
    }
    if how == "missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(f"{folder}/model.safetensors")
        del tensors["score.weight"]
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message[how]):
        load(f"model:{folder if how != 'absent' else tmp_path}")


def test_a_conversation_that_the_model_cannot_read_is_its_row_s_error(tmp_path):
    tokenizer = character_tokenizer("0123456789+-=")
    short = load(f"model:{made(tmp_path / 'short', tokenizer, max_position_embeddings=9)}")
    assert len(values(short, "1234", "123")) == 2
    with pytest.raises(RewardError, match=r"row 2 failed: .* cannot read .*: .* 10 tokens; the model has 9 positions"):
        values(short, "1", "12345")
    other = load(f"model:{made(tmp_path / 'other', tokenizer, vocab_size=5)}")
    with pytest.raises(RewardError, match=r"row 1 failed: .* cannot read .*: .* the model has 5 embeddings"):
        values(other, "9")


def test_a_model_in_hand_has_the_fingerprint_of_its_folder(tmp_path):
    tokenizer = character_tokenizer("0123456789+-=")
    one, other = made(tmp_path / "one", tokenizer), made(tmp_path / "other", tokenizer, max_position_embeddings=9)
    marks = [load([RewardModel(folder)]).fingerprint for folder in (one, other, one)]
    assert marks[0] == marks[2] != marks[1]
