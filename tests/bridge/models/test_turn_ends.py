"""The last trained token of a turn ends it: in the stop set of every sampler, and in every exported folder."""

import json
import re

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.models.chat_templates import next_header
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.own_model import own_source
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.models.turn_ends import remark_on_ends, stop_tokens
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout import InProcessRollout
from rl_tools.cli import main
from tests.support.chat_templates import KINDS, bytes_tokenizer
from tests.support.own_models import Tiny

BASE = "<|endoftext|>"
ROLES = ("user", "assistant", "user", "assistant")
TALK = [{"role": role, "content": text} for role, text in zip(ROLES, ("1+1?", "2", "2+2?", "4"), strict=True)]
TINY = {"hidden": 16, "layers": 1, "heads": 2}


def tokenizer_of(kind, eos):
    """``eos`` "base": the end of a sequence is another token than the template's end of a turn."""
    tokenizer = bytes_tokenizer(kind)
    if eos == "base":
        tokenizer.add_special_tokens({"eos_token": BASE})
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_of(tokenizer, stops):
    model = TinySource.for_tokenizer(tokenizer, **TINY).whole()
    model.generation_config.eos_token_id = stops
    return model


def last_trained(tokenizer, kind):
    """The token that ends the last turn, of rows that are imitated, of completions that are compared, without roles."""
    thought = "<think>so</think>" if kind == "opens thought" else ""
    talk = [turn | {"content": thought + turn["content"]} if turn["role"] == "assistant" else turn for turn in TALK]
    rows = [{"messages": talk[:2]}, {"messages": talk}, {"prompt": "1+1?", "response": "2"}]
    trajectories = [encode_row(tokenizer, row) for row in rows]
    trajectories += [encode_row(tokenizer, row, apply_chat_template=False) for row in rows]
    trajectories += [encode_completion(tokenizer, talk[:3], talk[3:]), encode_completion(tokenizer, "1+1?", "2")]
    return {t.tokens[-1] for t in trajectories}


@pytest.mark.parametrize("stops", ["none", "one", "several"])
@pytest.mark.parametrize("eos", ["own", "base"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_trained_end_stops_the_sampler_and_the_exported_model(tmp_path, capsys, kind, eos, stops):
    tokenizer = tokenizer_of(kind, eos)
    named = {"none": None, "one": tokenizer.eos_token_id, "several": [7, tokenizer.eos_token_id]}[stops]
    model, ends = model_of(tokenizer, named), last_trained(tokenizer, kind)
    before = set() if named is None else {named} if stops == "one" else set(named)
    assert ends | before == stop_tokens(model, tokenizer) == InProcessRollout(StateSource(model), tokenizer).ends()[0]
    assert not any(TurnTemplate(tokenizer, before | ends).ends(token) for token in (0, 9))
    save_pretrained(tmp_path / "model", model, tokenizer)
    exported = json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert ({exported} if isinstance(exported, int) else set(exported)) == ends | before
    if stops == "several":
        assert exported[:2] == named, "the folder's own come first"
    remarks(), capsys.readouterr()
    remark_on_ends(StateSource(model), tokenizer)
    text, others = capsys.readouterr().out, sorted(ends - before)
    assert bool(text) == bool(others) and remarks() == ([text.strip()] if text else [])
    assert all(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" in text for token in [*others, *before] if text)
    if eos == "base" and KINDS[kind][1]:
        assert tokenizer.convert_tokens_to_ids(KINDS[kind][1]) in ends, "the template's end is trained"


def test_a_special_token_before_the_words_ends_no_turn():
    tokenizer = tokenizer_of("roles", "own")
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "<|im_start|>{{ m.content }}")
    assert stop_tokens(model_of(tokenizer, None), tokenizer) == {tokenizer.eos_token_id}
    tokenizer.chat_template = "{{ raise_exception('no messages at all') }}"
    assert stop_tokens(model_of(tokenizer, None), tokenizer) == {tokenizer.eos_token_id}


ASKED = re.compile(r"{% if add_generation_prompt %}(.*){% endif %}$", re.DOTALL)


@pytest.mark.parametrize("eos", ["own", "base"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_header_behind_every_reply_is_no_end_of_a_turn(kind, eos):
    """The first template of Meta-Llama-3-8B-Instruct: the header of a reply stands behind the last one, too."""
    tokenizer = tokenizer_of(kind, eos)
    assert next_header(tokenizer) is None
    tokenizer.chat_template, count = ASKED.subn(r"\1{{ '' }}", tokenizer.chat_template)  # a newline at the end stays
    assert count == 1
    tokenizer.name_or_path = "some/model"
    for row in ({"messages": TALK[:2]}, {"prompt": TALK[:1], "response": "2"}, {"prompt": TALK[:3], "response": "4"}):
        with pytest.raises(
            ValueError, match=r"chat template of 'some/model' writes '.*' behind the last reply.*--chat-t"
        ):
            encode_row(tokenizer, row)
    assert stop_tokens(model_of(tokenizer, None), tokenizer) == {tokenizer.eos_token_id}
    encode_row(tokenizer, {"prompt": "1+1?", "response": "2"})
    encode_row(tokenizer, {"messages": TALK[:2]}, apply_chat_template=False)
    prompt = encode_prompt(tokenizer, TALK[:1])
    tokenizer.chat_template = KINDS[kind][0]
    assert prompt == encode_prompt(tokenizer, TALK[:1])
    thought = "<think>so</think>" if kind == "opens thought" else ""
    encode_row(tokenizer, {"messages": [TALK[0], {**TALK[1], "content": f"{thought}2"}]})


REAL = {
    "command-r": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ '<|start_header_id|>' if m.role == 'user' else "
    "'<start_of_turn>' }}{{ m.content }}<|end_header_id|>{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "<start_of_turn>{% endif %}",
    "instructions": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "no roles": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "an end at last": "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% if loop.last and m.role != "
    "'user' %}{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
    "elements": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "roles alternate": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
}


@pytest.mark.parametrize("form", REAL)
def test_an_end_of_a_turn_is_no_header(form):
    tokenizer = tokenizer_of("chatml", "own")
    tokenizer.chat_template = REAL[form]
    assert next_header(tokenizer) is None
    always, count = ASKED.subn(r"\1", REAL[form])
    tokenizer.chat_template = always
    assert (next_header(tokenizer) is not None) == bool(count)


CALLS = """{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}{% endfor %}\
{% if BUILT_IN %}<|end_of_call|>{% else %}<|im_end|>{% endif %}{% else %}"""


@pytest.mark.parametrize("of_its_own", [True, False], ids=["another end", "the same end"])
def test_a_turn_that_calls_a_tool_may_end_with_another_token(tmp_path, of_its_own):
    tokenizer = tokenizer_of("chatml", "own")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_of_call|>"]}, replace_extra_special_tokens=False)
    turn = "{{ m.content }}<|im_end|>"
    assert turn in tokenizer.chat_template
    calls = CALLS.replace("BUILT_IN", "tools" if of_its_own else "false")
    tokenizer.chat_template = tokenizer.chat_template.replace(turn, f"{calls}{turn}{{% endif %}}")
    call = {"type": "function", "function": {"name": "search", "arguments": {"text": "x"}}}
    tool = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}}
    row = {"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
    trained = [
        token for t in (encode_row(tokenizer, row),) for token, on in zip(t.tokens, t.loss_mask, strict=True) if on
    ]
    end = tokenizer.convert_tokens_to_ids("<|end_of_call|>" if of_its_own else "<|im_end|>")
    assert end in trained[-2:]
    model = model_of(tokenizer, tokenizer.eos_token_id)
    assert stop_tokens(model, tokenizer) == {tokenizer.eos_token_id, end}
    save_pretrained(tmp_path / "model", model, tokenizer)
    exported = json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert exported == ([tokenizer.eos_token_id, end] if of_its_own else tokenizer.eos_token_id)


def test_a_folder_without_generation_gets_none_and_a_class_of_one_s_own_is_stopped(tmp_path, capsys):
    tokenizer = character_tokenizer("0123456789+=")
    source = own_source(Tiny, tokenizer)
    remark_on_ends(source, tokenizer)
    assert not capsys.readouterr().out and not remarks()
    assert InProcessRollout(source, tokenizer).ends() == (frozenset([tokenizer.eos_token_id]), Tiny.max_positions)


@pytest.fixture
def base(tmp_path):
    """A base model whose chat template ends turns with another token than its sequences, and rows of each kind."""
    tokenizer = tokenizer_of("chatml", "base")
    model_of(tokenizer, tokenizer.eos_token_id).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    sums = [[{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(6)]
    rows = {
        "sft": [{"messages": turns} for turns in sums],
        "preference": [
            {"prompt": turns[:1], "chosen": turns[1:], "rejected": [{**turns[1], "content": "7"}]} for turns in sums
        ],
        "policy": [{"prompt": turns[:1], "answer": turns[1]["content"]} for turns in sums],
    }
    for name, part in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return tmp_path, tokenizer


SHORT = {
    "sft": ["--steps", 1, "--rows-per-step", 2],
    "preference": ["--steps", 1, "--rows-per-step", 2],
    "policy": [
        *("--sft.steps", 0, "--policy.steps", 1, "--policy.prompts-per-step", 1),
        *("--policy.sampling.n", 2, "--policy.sampling.max-new-tokens", 4),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("trainer", list(SHORT))
def test_a_run_names_both_tokens_once_and_exports_both(base, capsys, trainer):
    folder, tokenizer = base
    more = ["--data", folder / f"{trainer}.jsonl", "--held-out", 1, "--threads", 1, "--output", folder, *SHORT[trainer]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    line = f"turns end with '<|im_end|>' ({end}), and the model's generation_config.json stops at '{BASE}'"
    assert main(["train", trainer, "--name", "run", "--model", *map(str, (folder / "base", *more))]) == 0
    assert capsys.readouterr().out.count(line) == 1
    exported = json.loads((folder / "run" / "model" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [tokenizer.eos_token_id, end]
