"""A conversation as text is read as its messages, or refused: it is never trained on as a plain text in silence."""

import json
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from rl_bridge.data.rows import RESPONSES, policy_row, supervised_row, text_of
from rl_bridge.loop.data import any_row

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
    "JSON with a comma too many": '[{"role": "user", "content": "1", "name": null, "cached": true, "is_new": false},]',
    "Python with null": "[{'role': 'user', 'content': null}]",
    "a date": "[{'role': 'user', 'content': '1', 'at': datetime.datetime(2026, 1, 2, 3, 4)}]",
    "a time stamp of pandas": "[{'role': 'user', 'content': '1', 'at': Timestamp('2026-01-02')}]",
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


OTHERS = ("response", "completion", "answer", "gold", "chosen", "rejected", "note")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("form", [*READ, *REFUSED])
def test_a_column_that_a_reward_alone_reads_stays_as_it_is(form, name):
    text = (READ | REFUSED)[form]
    for read in (policy_row, any_row):
        assert read({"prompt": "1+1", name: text})[name] == text


SCALARS = {
    "text": ("2", "2"),
    "a number": (2, "2"),
    "a float": (2.5, "2.5"),
    "a decimal": (Decimal("2.50"), "2.50"),
    "yes": (True, "True"),
    "a date": (date(2026, 1, 2), "2026-01-02"),
    "a number of NumPy": (np.int64(2), "2"),
}
NO_TEXT = {
    "bytes": b"2",
    "a set": {"2"},
    "an object": object(),
    "not a number": float("nan"),
    "an infinite decimal": Decimal("Infinity"),
    "a mapping": {"a": 1},
    "a memory": bytearray(b"2"),
}


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("form", [*SCALARS, *NO_TEXT])
def test_a_response_is_text_a_number_or_messages(form, name):
    """Bytes of a binary column, or a set, would be trained on as Python prints them."""
    row = {"prompt": "1+1", name: SCALARS[form][0] if form in SCALARS else NO_TEXT[form]}
    if form in SCALARS:
        assert text_of(supervised_row(row)[name]) == SCALARS[form][1]
    else:
        with pytest.raises(ValueError, match=f"{name} must be text or messages, got"):
            supervised_row(row)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("exponent", [-9, -1, 0, 1, 30, 51, 52, 53, 54, 63, 83, 200, 1023])
def test_a_float_has_the_text_of_a_whole_number_where_no_other_number_has_it(exponent, sign):
    """From 2**53 on a float stands for several whole numbers: it stays the text of a float."""
    for number in (sign * 2.0**exponent, sign * 1.5 * 2.0**exponent, sign * np.nextafter(2.0**exponent, 0)):
        text = text_of(float(number))
        assert float(text) == number
        assert text.removeprefix("-").isdigit() == (float(number).is_integer() and abs(number) < 2**53)


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_a_text_that_is_no_message_stays_a_text(text):
    assert policy_row({"prompt": "x", "answer": text})["answer"] == text
    assert policy_row({"prompt": text})["prompt"] == text
    assert supervised_row({"prompt": text, "response": text})["response"] == text
