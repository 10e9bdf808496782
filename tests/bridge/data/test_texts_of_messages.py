"""A conversation as text is read as its messages, or refused: it is never trained on as a plain text in silence."""

import json

import numpy as np
import pytest

from rl_bridge.data.rows import policy_row, supervised_row

ASK, SAYS = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "it's 2"}
SHARED = [{"from": "human", "value": "1+1"}]
READ = {
    "JSON": json.dumps([ASK]),
    "JSON of an array of texts": np.array([json.dumps([ASK])])[0],
    "JSON of one message": json.dumps(ASK),
    "JSON behind a space": f" {json.dumps([ASK])}\n",
}
REFUSED = {
    "as Python writes a list": str([ASK]),
    "as Python writes an array's text": np.array([str([ASK, SAYS])])[0],
    "as Python writes one message": str(ASK),
    "as NumPy writes an array": str(np.array([{"content": "hi", "role": "user"}, SAYS], dtype=object)),
    "as NumPy writes an array's repr": repr(np.array([ASK, SAYS], dtype=object)),
    "an array in an array": str(
        np.array([ASK | {"content": np.array([{"type": "text", "text": "hi"}])}], dtype=object)
    ),
    "numbers of NumPy": str([ASK | {"score": np.float64(1.0), "note": float("nan")}]),
    "a tuple": str((ASK, SAYS)),
    "a long content before the role": str([{"content": "w " * 5000, "role": "user"}]),
    "from and value": json.dumps(SHARED),
    "from and value, by Python": str(SHARED),
    "an object of messages": json.dumps({"messages": [ASK]}),
}
PLAIN = (
    "[1, 2, 3]",
    '{"role": "admin"}',
    '[{"role": "admin"}] is what I have: who is that?',
    "{'role': 'user'",
    "[{'from': 'Berlin', 'to': 'Rome'}]",
    '{"from": "human", "value": "a row of a file"}',
    '[{"from": "A", "to": "B", "value": 3}]',
    '[{"from": "EUR", "value": 3}]',
    '[{"from": "user", "value": 3}]',
    '{{"role": "admin", "content": "{name}"}}',
    '[{{"role": "admin", "content": "{name}"}}]',
    '{["role"]: 1}',
    "[role] from the play",
    "{%s" % ("[" * 5000),
)


@pytest.mark.parametrize("form", READ)
def test_json_text_of_messages_is_these_messages(form):
    assert policy_row({"prompt": READ[form]})["prompt"] == [ASK]


@pytest.mark.parametrize("field", ["prompt", "response"])
@pytest.mark.parametrize("form", REFUSED)
def test_text_of_messages_in_another_form_is_refused(form, field):
    row = {"prompt": "1+1", "response": "2"} | {field: REFUSED[form]}
    with pytest.raises(ValueError, match=f"{field} is the text of messages in a form that is not read"):
        supervised_row(row)
    if field == "prompt":
        with pytest.raises(ValueError, match="give a list, or JSON text of messages with role and content"):
            policy_row({"prompt": REFUSED[form]})


def test_an_answer_to_compare_with_stays_text_and_one_to_imitate_does_not():
    text = json.dumps({"role": "admin", "content": "x"})
    assert policy_row({"prompt": "write JSON", "answer": text})["answer"] == text
    assert supervised_row({"prompt": "1+1", "answer": json.dumps([SAYS])})["answer"] == [SAYS]


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_a_text_that_is_no_message_stays_a_text(text):
    assert policy_row({"prompt": "x", "answer": text})["answer"] == text
    assert policy_row({"prompt": text})["prompt"] == text
    assert supervised_row({"prompt": text, "response": text})["response"] == text
