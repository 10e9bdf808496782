"""Rows and files that nobody can have meant (USR-16, 17, 18): refused by name, or counted where they may be meant."""

import json
from dataclasses import replace

import pytest

from rl_bridge.data.census import Census
from rl_bridge.data.comparisons import read_comparisons
from rl_bridge.data.rows import policy_row, read_rows, supervised_row
from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.models.chat_templates import rendered, use_template
from rl_bridge.models.pretrained import new_for_rows
from rl_bridge.models.row_checks import check_rows, supervised
from rl_bridge.pipelines.training import load_rows, split
from rl_bridge.rewards.sources import exact_match
from rl_bridge.run.run import open_run
from rl_tools.report.run_files import read_run
from rl_tools.report.sections import warnings_of
from rl_tools.trainer_options import TRAINERS, load
from rl_train.compared import load_comparisons
from rl_train.preference import PreferencePipeline
from rl_train.sft import SFTPipeline

USER, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
DEEP = "[" * 100_000 + "]" * 100_000
FILES = {
    "deep.json": (DEEP, "nested too deep"),
    "deep.jsonl": (DEEP + "\n", r"row 1: nested too deep"),
    "twice.csv": ("prompt,answer,answer\na,b,c\n", "names the column 'answer' twice"),
    "rows.txt": ('{"prompt": "a"}\n', r"does not end in \.json"),
    "rows": ('{"prompt": "a"}\n', r"does not end in \.json"),
    "rows.jsonl.gz": ("x", r"does not end in \.json"),
    "lists.jsonl": (
        "[1]\n" * 9,
        "expected an object with fields prompt, got list; the same in ",
    ),
    "nan.jsonl": ('{"prompt": "a", "response": NaN}\n', "response must be text or messages, got nan"),
    "infinity.jsonl": ('{"prompt": "a", "response": -Infinity}\n', "response must be text or messages, got -inf"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_nobody_can_have_meant_is_refused_by_name_usr_16_17_18(name, tmp_path):
    content, message = FILES[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_rows(str(tmp_path / name), check=supervised_row)
    assert str(tmp_path / name) in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("check", "row", "message"),
    [
        (policy_row, {"prompt": "2+2?", "messages": [USER]}, "messages do not hold the prompt"),
        (supervised_row, {"prompt": [SAID], "messages": [USER, SAID], "answer": "2"}, "do not hold the prompt"),
        (policy_row, {"prompt": [USER, SAID]}, "nothing to sample"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_usr_18(check, row, message):
    with pytest.raises(ValueError, match=message):
        check(row)


@pytest.mark.parametrize("answer", [["2"], {"value": 2}])
def test_an_answer_that_equals_no_text_is_refused_usr_18(answer):
    with pytest.raises(ValueError, match="answer must be text or a number"):
        exact_match("2", {"answer": answer})


def test_pairs_that_teach_nothing_are_counted_and_all_of_them_refused_usr_18(tmp_path, capsys):
    file = tmp_path / "pairs.jsonl"
    same, other = (
        '{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
    )
    file.write_text(other + same + same)
    assert len(read_comparisons(str(file))) == 3
    assert "2 of 3 rows teach nothing: chosen and rejected are the same, first" in capsys.readouterr().out
    file.write_text(same * 2)
    with pytest.raises(ValueError, match="are the same in every row"):
        read_comparisons(str(file))
    file.write_text('{"prompt": "a", "completions": ["b", "b"]}\n{"prompt": "a", "completions": ["b", "c"]}\n')
    assert len(read_comparisons(str(file))) == 2
    assert "1 of 2 rows teach nothing: completions are the same, first" in capsys.readouterr().out
    file.write_text('{"prompt": "a", "completion": "b", "label": true}\n' * 2)
    assert len(read_comparisons(str(file))) == 2
    assert "every label is true" in capsys.readouterr().out


def test_control_tokens_in_what_somebody_said_are_counted_usr_18(capsys):
    rows = arithmetic_rows(["+"])[:4]
    source, tokenizer = new_for_rows([*rows, {"prompt": "<eos>|", "answer": "usr"}], seed=0)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    chat = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "2"}]}
        for row in rows
    ]
    chat[2]["messages"][0]["content"] += "<eos>"
    check_rows(source, tokenizer, chat, supervised(tokenizer))
    assert "1 of 4 rows have control tokens in the content of a message" in capsys.readouterr().out
    check_rows(source, tokenizer, rows, supervised(tokenizer))  # text may hold them on purpose
    assert capsys.readouterr().out == ""


TEMPLATES = ("{{ 1 / 0 }}", "{% for i in range(9999999) %}a{% endfor %}", "{{ messages.x.y.z }}")


@pytest.mark.parametrize("text", [*TEMPLATES, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_template_that_fails_is_named_by_its_file_usr_16_17(text, tmp_path):
    _, tokenizer = new_for_rows(arithmetic_rows(["+"])[:4], seed=0)
    file = tmp_path / "own.jinja"
    file.write_text(text)
    use_template(tokenizer, file)
    with pytest.raises(ValueError, match=r"the chat template .*own\.jinja refuses messages of the roles user"):
        rendered(tokenizer, [USER], generation_prompt=True)


def test_held_out_rows_that_are_trained_on_are_counted_usr_18(tmp_path, capsys):
    one, two = '{"prompt": "a", "answer": "b"}\n', '{"prompt": "c", "answer": "d"}\n'
    (tmp_path / "data.jsonl").write_text(one)
    (tmp_path / "eval.jsonl").write_text(two + one)
    options = SFTPipeline(data=str(tmp_path / "data.jsonl"), eval_data=str(tmp_path / "eval.jsonl"))
    assert [len(rows) for rows in load_rows(options)] == [1, 2]
    assert "1 of 2 rows of --eval-data have the prompt of a row of --data" in capsys.readouterr().out
    for name in ("data", "eval"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    pairs = PreferencePipeline(data=options.data, eval_data=options.eval_data)
    assert [len(rows) for rows in load_comparisons(pairs)] == [1, 1]
    assert "1 of 1 rows of --eval-data have the prompt of a row of --data" in capsys.readouterr().out


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHARED = {
    "another index": ({"prompt": "a", "answer": "b"}, {"extra_info": {"split": "test", "index": 7}}),
    "another answer": ({"prompt": "a", "answer": "b"}, {"answer": "c"}),
    "keys in another order": (
        {"prompt": [{"role": "user", "content": "a"}], "answer": "b"},
        {"prompt": [{"content": "a", "role": "user"}]},
    ),
    "a conversation": ({"messages": TALK}, {"id": "9", "messages": [*TALK, *TALK]}),
}


@pytest.mark.parametrize("case", SHARED)
def test_rows_of_one_prompt_are_shared_whatever_else_their_columns_say(case, tmp_path, capsys):
    """The rows of verl name their part and their place in extra_info: none was ever called shared."""
    row, change = SHARED[case]
    row = {"extra_info": {"split": "train", "index": 0}, **row}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    other = {"prompt": "z", "answer": "z"}
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, [{**row, **change}, other])))
    options = SFTPipeline(data=str(tmp_path / "data.jsonl"), eval_data=str(tmp_path / "eval.jsonl"))
    load_rows(options, (), supervised_row)
    assert "1 of 2 rows of --eval-data have the prompt of a row of --data" in capsys.readouterr().out
    (tmp_path / "eval.jsonl").write_text(json.dumps(other))
    load_rows(options, (), supervised_row)
    assert "rows of --eval-data" not in capsys.readouterr().out


def test_what_is_remarked_about_the_inputs_is_in_the_record_and_the_report_usr_18(tmp_path, capsys):
    """Rows that are left out because their prompts are held out, and a part for training that is the smaller one."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(n % 8), "answer": str(n)}) + "\n" for n in range(14)))
    options = SFTPipeline(data=str(file), held_out=6, output=tmp_path / "runs", checkpoint_every=1)
    options.start()
    load_rows(replace(options, held_out=7))  # of a run that does not come to its record
    capsys.readouterr()
    for steps in (1, 2):  # the second is a resumed one
        options.start()
        train, held_out = load_rows(options)
        with open_run(options, {}, None, ()) as run:
            for step in run.steps("sft", steps, state={}):
                run.log(step, {"nll": 1.0})
        options = replace(options, resume=True)
    left_out = 14 - len(train) - len(held_out)
    told = [
        f"{file}: {left_out} of 14 rows are left out: their prompts are those of held-out rows",
        f"{file}: {len(train)} rows are trained on and 6 held out: a smaller --held-out, or --eval-data FILE",
    ]
    assert len(held_out) == 6 and left_out >= 4 and len(train) < 6
    said, warnings = capsys.readouterr().out, warnings_of(read_run(run.folder))
    for line in told:
        assert said.count(line) == 2 and sum(line in warning for warning in warnings) == 1, warnings
    assert sum("held" in warning for warning in warnings) == 2


@pytest.mark.parametrize("rows", [2, 5, 199, 200, 201, 1199, 1200])
@pytest.mark.parametrize("trainer", ["sft", "policy", "reward-model", "preference"])
def test_a_small_file_has_a_fifth_held_out_where_no_number_is_given(trainer, rows, tmp_path, capsys):
    """A first run on 300 rows of one's own was refused: 600 were to be held out."""
    fields = ("prompt", "chosen", "rejected") if trainer in ("reward-model", "preference") else ("prompt", "answer")
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({name: f"{name} {n}" for name in fields}) + "\n" for n in range(rows)))
    start = load(TRAINERS[trainer].default)()
    default = type(start).held_out
    options = replace(start, data=str(file))
    train, held_out = split(options, [{"prompt": str(n)} for n in range(rows)], Census())
    count = default if 2 * default <= rows else max(1, rows // 5)
    assert (len(held_out), len(train)) == (count, rows - count)
    line = f"{rows} distinct prompts, of which {count} are held out and not {default}: --held-out N"
    assert (line in capsys.readouterr().out) == (count != default)
    given = replace(options, held_out=default + 1)
    if rows > default + 1:
        assert len(split(given, [{"prompt": str(n)} for n in range(rows)], Census())[1]) == default + 1
    else:
        with pytest.raises(ValueError, match=f"cannot hold out {default + 1} distinct prompts of {rows} rows"):
            split(given, [{"prompt": str(n)} for n in range(rows)], Census())


@pytest.mark.parametrize("held_out", [8, 600])
def test_more_held_out_than_there_are_is_refused_with_the_way_on(held_out, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(n), "answer": "a"}) + "\n" for n in range(8)))
    with pytest.raises(
        ValueError, match=f"cannot hold out {held_out} distinct prompts of 8 rows .*--held-out, or --ev"
    ):
        load_rows(SFTPipeline(data=str(file), held_out=held_out))
