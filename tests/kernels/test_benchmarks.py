"""The benchmarks count memory that comes and goes, compare gradients, and know the hardware's arithmetic."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

SMALL = {"groups": 1, "length": 4, "hidden_size": 8, "vocabulary": 16}


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch):
    names = ("limits", "harness", "linear_logprobs", "logits_logprobs")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "kernels" / "benchmarks")
    yield
    for name in names:
        sys.modules.pop(name, None)


TWO_AT_ONCE = """
import sys
import torch
from harness import child

def way(x, size):
    a = torch.ones(size, dtype=torch.uint8)
    b = torch.ones(size, dtype=torch.uint8)
    del a, b
    torch.ones(size, dtype=torch.uint8)
    return x.sum()

def problem(case, on):
    return [torch.ones(1, requires_grad=True)], case

child({"two": way}, problem, sys.argv[1])
"""


@pytest.mark.long
def test_the_peak_is_what_was_there_at_once(tmp_path):
    """In a process of its own, as the benchmarks measure: one that has freed much before has it resident still."""
    request = {"way": "two", "case": {"size": 64 << 20}, "small": {"size": 1}, "threads": 1, "repeats": 1}
    folder = Path(__file__).parents[2] / "kernels" / "benchmarks"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", TWO_AT_ONCE, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    found = json.loads(done.stdout)
    # The kernel counts resident pages a few at a time.
    assert abs(found["extra"] - (128 << 20)) < 4 << 20 and found["gradients"] == 4 and found["norms"] == [1.0]


@pytest.mark.parametrize("name", ["linear_logprobs", "logits_logprobs"])
def test_all_ways_agree(name):
    script, harness = import_module(name), import_module("harness")
    rows = []
    for way in [way for way in script.WAYS if "compile" not in way]:
        found = harness.one(script.WAYS[way], script.problem, SMALL | {"groups": 3}, SMALL, 1)
        rows.append({"case": {}, "way": way, **found})
    ran = [row["way"] for row in rows if "norms" in row]
    assert {next(iter(script.WAYS)), "ours, torch"} <= set(ran)
    assert harness.disagreements(rows, 1e-4) == []
    rows[-1]["norms"] = [0.0] * len(rows[0]["norms"])
    assert [rows[-1]["way"] in x for x in harness.disagreements(rows, 1e-4)] == [True] * len(rows[0]["norms"])


def test_table_and_plot(tmp_path):
    script = import_module("linear_logprobs")
    case = {"groups": 2, "length": 512, "hidden_size": 8, "vocabulary": 16}
    facts = {"hardware": "a machine", "threads": 1, "reached": {"tflops": 0.1, "gbs": 10.0}, "versions": {"torch": "2"}}
    rows = [
        {"case": case, "way": "ours, torch", "extra": 9 << 20, "gradients": 4 << 20, "forward_s": 0.5, "both_s": 2.0},
        {"case": case, "way": "Liger", "missing": "No module named 'liger_kernel'"},
        {"case": case, "way": "ours, fused", "out_of_memory": True},
    ]
    result = {"device": "cpu", "facts": facts | {"date": "2026-01-01", "load": 1.0}, "turns": 1, "cases": [case]}
    table = script.table(result | {"rows": rows, "disagreements": []})
    assert "| ours, torch | 5 | 9 | 0.500 | 2.000 |" in table and "| ours, fused | out of memory |" in table
    assert "| Liger | No module named 'liger_kernel' |" in table and "a GPU (none was at hand)" in table
    script.plot(result | {"rows": rows}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_peer_that_is_not_installed_is_missing():
    harness, script = import_module("harness"), import_module("linear_logprobs")

    def way(*leaves, **rest):
        import no_such_library  # noqa: F401

    assert harness.one(way, script.problem, SMALL, SMALL, 1) == {"missing": "No module named 'no_such_library'"}
    assert harness.cells(harness.one(way, script.problem, SMALL, SMALL, 1))[0] == "No module named 'no_such_library'"


def test_limits():
    """2·N·V·H for a product: a forward of Llama-3-8B's head over 8192 rows is 8.6 TFLOP, 10.9 ms at 790 TFLOP/s."""
    limits = import_module("limits")
    head = limits.Head(8192, 4096, 128256)
    assert head.flops(1) == pytest.approx(8.607e12, rel=1e-3) and head.logits() == 2 * 8192 * 128256
    assert head.gradients() == 2 * 4096 * (8192 + 128256)
    row = next(x for x in limits.table(790, 4300).splitlines() if x.startswith("| Llama-3-8B | 8192 "))
    assert row == "| Llama-3-8B | 8192 | 2.0 | 10.9 | 43.6 | 32.7 | 0.49 | 0.98 |"
    rows = limits.blocks_table(790, 4300).splitlines()
    assert "| Llama-3-8B | 512 | 7680 x 7552 | 6.4 % |" in rows
    assert "| Llama-3-8B | 1024, fused | 1212 x 8192 | 23.2 % |" in rows
