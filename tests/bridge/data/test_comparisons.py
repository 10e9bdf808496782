"""Rows of preferences: every form is read, every bad row is named, and a comparison stays whole."""

import json

import pytest
import torch

from rl_bridge.data.comparisons import comparison_of, pair_parts, read_comparisons, stand_in_pair
from rl_bridge.data.examples import batch_of, examples_of
from rl_bridge.data.token_batch import units_of
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.encoding import encode_completion
from rl_bridge.models.small import character_tokenizer
from tests.support.comparisons import PAD, random_comparisons

ASK = [{"role": "user", "content": "2+2?"}]
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
PAIRS = {
    "text": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", ("4", "5")),
    "messages and text": ({"messages": ASK, "chosen": "4", "rejected": "5"}, ASK, ("4", "5")),
    "a message each": ({"messages": ASK, "chosen": FOUR, "rejected": [FIVE]}, ASK, ([FOUR], [FIVE])),
    "two conversations": ({"chosen": [*ASK, FOUR], "rejected": [*ASK, FIVE]}, ASK, ([FOUR], [FIVE])),
    "ultrafeedback": ({"prompt": "2+2?", "chosen": [*ASK, FOUR], "rejected": [*ASK, FIVE]}, ASK, ([FOUR], [FIVE])),
    "arrow": ({"prompt": "2+2=", "chosen": "4", "rejected": "5", "completion": None}, "2+2=", ("4", "5")),
}
BAD = {
    "'rejected' is empty text": {"prompt": "2", "chosen": "4", "rejected": ""},
    "expected chosen and rejected, or completion and label": {"prompt": "2", "answer": "4"},
    r"the row has \['chosen', 'completion', 'prompt'\]": {"prompt": "2", "chosen": "4", "completion": "4"},
    "expected one of prompt and messages; the row has neither": {"chosen": "4", "rejected": "5"},
    "one of prompt and messages; the row has prompt and": {
        "prompt": "2",
        "messages": ASK,
        "chosen": "4",
        "rejected": "5",
    },
    "completions must be a list of at least two": {"prompt": "2", "completions": ["4"]},
    "label must be true or false": {"prompt": "2", "completion": "4", "label": "perhaps"},
    "margin must be a finite number, got 'inf'": {"prompt": "2", "chosen": "4", "rejected": "5", "margin": "inf"},
    "margin must be a finite number, got True": {"prompt": "2", "chosen": "4", "rejected": "5", "margin": True},
    "chosen must begin with a message of the assistant": {"prompt": "2", "chosen": ASK, "rejected": "5"},
    "messages ends with the assistant's message": {"messages": [*ASK, FOUR], "chosen": "4", "rejected": "5"},
    "they are equal in 0 messages": {
        "chosen": [{"role": "user", "content": "3?"}, FOUR],
        "rejected": [*ASK, FIVE],
    },
    "they are equal in 1 messages of 1 and 2": {"chosen": ASK, "rejected": [*ASK, FIVE]},
    r"rejected\[0\] must be a message with role and content": {
        "prompt": "2",
        "chosen": "4",
        "rejected": [{"role": "a"}],
    },
}


def encode(prompt, completion):
    """Numbers in place of characters."""
    if "x" in completion:
        raise ValueError("no token for x")
    return single_turn([ord(c) for c in prompt], [ord(c) for c in completion])


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def text(trajectory):
    return "".join(map(chr, trajectory.tokens))


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair(form):
    row, prompt, completions = PAIRS[form]
    found = comparison_of(row)
    assert (found.kind, found.prompt, found.completions) == ("pair", prompt, completions)


SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize("before", [[QUESTION], [SYSTEM, QUESTION]], ids=["question", "with system"])
@pytest.mark.parametrize("field", ["prompt", "messages"])
@pytest.mark.parametrize(
    "beside",
    ["2+2?", "2+2?\n", "other", [QUESTION], [SYSTEM, QUESTION], [{**QUESTION, "content": "other"}]],
    ids=lambda value: value.strip() if isinstance(value, str) else f"{len(value)} {value[-1]['content']}",
)
def test_a_prompt_beside_whole_conversations_is_theirs_or_refused(before, field, beside):
    replies = ([{"role": "assistant", "content": text}] for text in ("4", "5"))
    chosen, rejected = ([*before, *reply] for reply in replies)
    row = {field: beside, "chosen": chosen, "rejected": rejected}
    if isinstance(beside, str):
        agree = field == "prompt" and beside.strip() == QUESTION["content"]
    else:
        agree = before[: len(beside)] == beside
    if agree:
        assert comparison_of(row).prompt == before
        assert comparison_of({**row, "messages": chosen}).prompt == before
    else:
        with pytest.raises(ValueError, match=r"do not hold the prompt|must be a list of messages"):
            comparison_of(row)


def test_labels_rankings_and_numbers(tmp_path):
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "b", "label": "0"},
        {"prompt": "a", "completions": ["b", [FOUR], "d"]},
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "0.5", "gold": "d"},
    ]
    found = read_comparisons(written(tmp_path, rows))
    assert [row.kind for row in found] == ["single", "single", "ranking", "pair"]
    assert [row.desirable for row in found] == [True, False, True, True]
    assert found[2].completions == ("b", [FOUR], "d")
    assert found[3].numbers == {"margin": 0.5} and found[3].gold == "d"
    assert found[1].where.endswith("rows.jsonl, row 2")


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path, message):
    path = written(tmp_path, [{"prompt": "2", "chosen": "4", "rejected": "5"}, BAD[message]])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2: .*{message}"):
        read_comparisons(path)


def rows_of(*rows):
    return [comparison_of(row) for row in rows]


TWO = ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "c", "rejected": "d"})
LABELLED = [
    {"prompt": prompt, "completion": completion, "label": label}
    for prompt, completion, label in (("p", "a", True), ("p", "b", False), ("q", "c", False), ("r", "d", True))
]


def test_pairs_triples_and_rankings_keep_their_order():
    pairs = examples_of(rows_of(*TWO), "pairs", encode)
    assert [[text(t) for t in example.completions] for example in pairs] == [["pa", "pb"], ["qc", "qd"]]
    (triple,) = examples_of(rows_of(TWO[0] | {"gold": "g"}), "triples", encode)
    assert [text(t) for t in triple.completions] == ["pa", "pb", "pg"]
    ranked = examples_of(rows_of({"prompt": "p", "completions": ["a", "b", "c"]}, TWO[1]), "ranking", encode)
    batch = batch_of(ranked, PAD)
    assert batch.present.tolist() == [[True, True, True], [True, True, False]]
    assert batch.counted().tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_single_completion_comes_with_one_of_another_prompt():
    for rows in (LABELLED, [*TWO]):
        examples = examples_of(rows_of(*rows), "singles", encode)
        assert len(examples) == 4
        for example in examples:
            own, other = map(text, example.completions)
            assert own[0] == other[0] and own[1] != other[1]
    labels = [example.desirable for example in examples]
    assert labels == [True, False, True, False]
    assert [text(example.completions[1]) for example in examples] == ["pc", "pc", "qa", "qa"]


def test_single_completions_are_matched_where_the_loss_needs_no_pairs():
    examples = examples_of(rows_of(*LABELLED), "pairs", encode, unmatched=True)
    assert [[text(t) for t in example.completions] for example in examples] == [["pa", "pb"], ["rd", "qc"]]
    examples = examples_of(rows_of(*LABELLED[:3]), "pairs", encode, unmatched=True)
    assert [[text(t) for t in example.completions] for example in examples] == [["pa", "pb"], ["pa", "qc"]]


@pytest.mark.parametrize(
    ("rows", "form", "options", "message"),
    [
        (LABELLED, "pairs", {"what": "dpo"}, "a row: dpo learns from chosen and rejected; this row has completion and"),
        (LABELLED[:1], "pairs", {"unmatched": True, "what": "bco"}, "bco compares .* has 1 and 0"),
        (LABELLED[:2], "singles", {}, "from completions of other prompts, and there is one"),
        (TWO, "triples", {"what": "tpo"}, "tpo needs a third completion: field 'gold'"),
        ([TWO[0], TWO[1] | {"margin": 1}], "pairs", {}, "a row: the first row has no numbers, this one has margin"),
        ([TWO[0] | {"chosen": "x"}], "pairs", {}, "a row: no token for x"),
    ],
)
def test_rows_that_a_loss_cannot_learn_from(rows, form, options, message):
    with pytest.raises(ValueError, match=message):
        examples_of(rows_of(*rows), form, encode, **options)


@pytest.mark.parametrize("rows", ["padded", "packed", "shared"])
@pytest.mark.parametrize("tokens", [1, 40, 90, 10**6])
def test_a_comparison_is_never_split(rows, tokens):
    batch = random_comparisons(9, 3, ragged=True)
    parts = pair_parts(batch, tokens, packing=rows == "packed", share_prefixes=rows == "shared")
    assert sorted(int(place) for part in parts for place in part.places) == list(range(9))
    for places, part in parts:
        assert part.completions.tokens.shape[0] == 3 * len(places)
        assert part.row_tokens() == [batch.row_tokens()[place] for place in places]
        assert torch.equal(part.ref_logprobs, batch.ref_logprobs[places])
        whole = part.completions
        size = sum(part.row_tokens()) if rows == "packed" else whole.tokens.numel()
        if rows == "shared" and (prefixes := whole.prefixes_worth_sharing()).any():
            units = units_of(whole.lengths.tolist(), whole.groups.tolist(), prefixes.tolist())
            size = sum(unit.tokens for unit in units)
        assert size <= tokens or len(places) == 1
    if rows == "shared" and tokens == 90:
        packed = pair_parts(batch, tokens, packing=True)
        assert len(parts) <= len(packed)


def test_a_stand_in_has_the_form_of_the_batch_and_counts_nothing():
    batch = random_comparisons(4, 2)._replace(numbers={"margin": torch.ones(4)})
    places, part = stand_in_pair(batch)
    assert len(places) == 0 and not part.present.any() and not part.completions.mask.any()
    assert part.completions.lengths.tolist() == [2, 2] and part.numbers["margin"].shape == (1,)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize("completion", ["5", [{"role": "assistant", "content": "5"}]])
@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_what_the_assistant_said_before_does_not_count(completion, apply_chat_template):
    tokenizer = character_tokenizer("ua:\n2345+?")
    tokenizer.chat_template = TEMPLATE
    prompt = [*ASK, FOUR, {"role": "user", "content": "2+3?"}]
    found = encode_completion(tokenizer, prompt, completion, apply_chat_template=apply_chat_template)
    counted = [token for token, drawn in zip(found.tokens, found.loss_mask, strict=True) if drawn]
    assert tokenizer.decode(counted).replace("\n", "").replace("<eos>", "") == "5"
    assert tokenizer.decode(found.tokens).count("4") == 1
    plain = encode_completion(tokenizer, "2+3?", "5")
    assert tokenizer.decode(plain.tokens) == "2+3?5<eos>" and plain.loss_mask == (False,) * 4 + (True,) * 2
