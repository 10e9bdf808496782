"""Words and files from outside: on the terminal (USR-12), as a program (USR-13), as a path or a score (USR-14)."""

import ast
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rl_bridge
from rl_bridge.common.terminal import escaped, tell
from rl_bridge.executors.executor import worker_error
from rl_bridge.models.stored_tensors import INDEX, SafetensorsFolder
from rl_bridge.rewards.scoring_models import Judge, NoReply, Server
from rl_tools.cli import main, report

BRIDGE = Path(rl_bridge.__file__).parents[1]
SOURCES = sorted(BRIDGE.rglob("*.py"))
CODES = "\x1b]0;t\x07 \x1b[2J \x9b31m \u202e \u2066 \u200b \x00 \x7f \r"


def assert_harmless(text):
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert "\\x1b]0;t\\x07" in text and "\\u202e" in text and "\\x9b31m" in text


def ends_with(error):
    def run(_):
        raise error

    return run


class Foreign(Exception):
    pass


def noted(error):
    error.add_note(CODES)
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError(CODES),
        OSError(28, "No space left on device", CODES),
        worker_error(1, CODES, ValueError(CODES), CODES),
        noted(ValueError(CODES)),
        Foreign(CODES),  # with its traceback
        noted(KeyboardInterrupt()),
    ],
    ids=["a value", "a file's name", "a worker", "a note", "a traceback", "an end"],
)
def test_no_error_moves_the_cursor_usr_12(error, capsys):
    report(ends_with(error), None)
    printed = capsys.readouterr()
    assert_harmless(printed.out + printed.err)


def test_no_result_command_or_line_of_a_run_does_usr_12(capsys):
    assert report(lambda _: {"result": CODES, "seconds": 1.0}, None) == 0
    assert main([CODES]) == 2 and main(["train", CODES]) == 2
    tell(f"run folder: {CODES}")
    printed = capsys.readouterr()
    for text in (*printed.out.splitlines(), *printed.err.splitlines()):
        assert_harmless(text)
    assert escaped("naïve → 日本 🙂\n\t") == "naïve → 日本 🙂\n\t"


def test_all_that_is_printed_goes_through_one_place_usr_12():
    """A ``print`` elsewhere says fixed words alone, or stands where no package can be imported."""
    apart = {"rl_bridge/common/terminal.py", "rl_bridge/common/guard.py"}
    found = []
    for file in SOURCES:
        place = str(file.relative_to(BRIDGE))
        for call in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "print" and place not in apart:
                said = ast.unparse(call.args[0])
                found += [] if said == "usage()" else [f"{place}:{call.lineno}: {said}"]
    assert found == []


@pytest.mark.long
def test_no_class_of_transformers_is_chosen_by_a_folders_code_usr_13():
    """Without the argument transformers asks on a terminal, and a ``y`` runs a file of the folder."""
    calls, without = 0, []
    for file in SOURCES:
        for call in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            if name.startswith("Auto") and name.endswith((".from_pretrained", ".from_config")):
                calls += 1
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                if given.get("trust_remote_code") != "False":
                    without.append(f"{file.name}:{call.lineno}: {name}")
    assert without == [] and calls >= 8


@pytest.mark.parametrize("file", ["../other/part.safetensors", "..", "", "sub/part.safetensors", 5, "ABSOLUTE"])
def test_an_index_names_files_beside_it_alone_usr_14(file, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for folder in ("other", "model", "model/sub"):
        save_file({"w": torch.zeros(1)}, tmp_path / folder / "part.safetensors")
    file = str(tmp_path / "other" / "part.safetensors") if file == "ABSOLUTE" else file
    index = tmp_path / "model" / INDEX
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match=r"weight_map must have|which is no file's name in its own folder") as refused:
        SafetensorsFolder.of_folder(tmp_path / "model")
    assert str(index) in str(refused.value)
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    assert SafetensorsFolder.of_folder(tmp_path / "model").shapes == {"w": (1,)}


@pytest.mark.parametrize("said", ["[[999]]", "[[10.01]]", "[[-1]]"])
def test_a_judges_number_outside_its_range_is_no_score_usr_14(said, monkeypatch):
    def reply(server, payload, stop=None, **_):
        return {"choices": [{"message": {"content": f"I was told to write {said}"}}]}

    monkeypatch.setattr(Server, "post", reply)
    fields = {"url": "http://127.0.0.1:1", "model": "m", "template": "{completion}", "maximum": 10.0}
    judge = Judge(**fields)
    with pytest.raises(NoReply, match=r"not from 0 to maximum = 10"):
        judge._ask(judge._server(), "", None)
    judge = Judge(**fields, missing=0.25)
    assert judge._ask(judge._server(), "", None) == 0.25


def test_a_traceback_has_no_secret_usr_11(monkeypatch, capsys):
    monkeypatch.setenv("SOME_PAT", "planted-in-a-variable")
    address = "http://me:planted-password@host/ok?api_key=planted-key&key=planted-short&n=3"
    report(ends_with(Foreign(f"{address} planted-in-a-variable")), None)
    report(ends_with(noted(ValueError(f"{address} planted-in-a-variable"))), None)
    printed = capsys.readouterr()
    assert "planted" not in printed.out + printed.err and "n=3" in printed.err


def test_the_streams_that_are_told_are_those_of_the_moment(monkeypatch):
    """A stream that is exchanged later, as by a test or a notebook, gets what is said."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["trian", "policy"]) == 2
    assert stream.getvalue() == "rl-fn: error: unknown command 'trian': did you mean rl-fn train? (rl-fn --help)\n"
