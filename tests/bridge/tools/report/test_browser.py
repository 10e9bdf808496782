"""The page in headless Chromium: it opens without an error or a request, fits a phone, and answers pointer and keys."""

import json
from pathlib import Path

import pytest

from rl_tools.report.page import write_report
from tests.bridge.tools.report.browser import browser
from tests.bridge.tools.report.runs import NAUGHTY, memory_lines, sample, write_lines, write_run, write_study

pytestmark = pytest.mark.browser

COMMITTED = Path(__file__).parents[4] / "experiments/results/quickstart/report.html"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two groups of three seeds, fewer have no interval; with text that would break a page that trusts it."""
    folder = tmp_path_factory.mktemp("runs")
    other = {"optimizer": {"learning_rate": 0.5}}
    runs = [write_run(folder / f"a{seed}", seed=seed) for seed in (0, 1, 2)]
    runs += [write_run(folder / f"b{seed}", seed=seed, shift=0.2, config=other) for seed in (0, 1, 2)]
    with (runs[0] / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 40, "changed": [NAUGHTY], "run": "a", "attempt": 1, "time": 1.0}) + "\n")
    write_lines(runs[1] / "memory.jsonl", memory_lines(steps=3))
    assert write_report(runs, folder / "report.html", title=NAUGHTY.replace("\0", "")) < 2_000_000
    return folder / "report.html"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_it_fits_and_nothing_fails(page, file, width, theme):
    page.errors.clear()
    page.requests.clear()
    page.open(file, width, theme=theme, mobile=width < 500)
    assert page.run(OVERFLOW) <= 0
    page.run("window.scrollTo(0, 1e6)")
    page.run("drawAll()")
    assert page.run(OVERFLOW) <= 0
    assert page.errors == [] and page.requests == [f"file://{file}"]
    wanted = ["curves", "comparison", "equation", "completions", "samples", "slowest", "memory", "options"]
    assert page.run("[...document.querySelectorAll('section')].map((one) => one.id)") == wanted
    assert page.run("document.title") != "broken"
    assert page.run("document.documentElement.dataset.theme") == theme
    # Every chart has a line with points, and no text of a model became an element.
    assert page.run("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('path[d^=M], circle'))")
    assert page.run("document.querySelectorAll('main script, main b > b').length") == 0
    assert page.run("/[\\u202e\\u2066\\u0000\\u001b]/.test(document.body.innerText)") is False
    assert "U+202E" in page.run("document.getElementById('samples').innerText")


def test_the_pointer_and_the_keys_read_values(page, file):
    page.open(file, 1440)
    page.point("#curves .plot", 0.999)
    assert "step 39" in page.run("document.querySelector('#curves .tip').innerText")
    page.run("document.querySelector('#curves .plot').focus()")
    page.key("Home")
    held_out = page.run("document.querySelector('#curves .tip').innerText")
    assert held_out.startswith("step 9") and "…" in held_out
    page.key("ArrowRight")
    assert page.run("document.querySelector('#curves .tip').innerText").startswith("step 19")
    page.key("Escape")
    assert page.run("document.querySelector('#curves .tip').hidden") is True


def test_two_seeds_have_a_mean_and_no_interval(page, tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (0, 1)]
    write_report(runs, tmp_path / "r.html")
    page.errors.clear()
    page.open(tmp_path / "r.html", 1440)
    page.run("document.querySelector('#curves .plot').focus()")
    page.key("Home")
    tip = page.run("document.querySelector('#curves .tip').innerText")
    assert tip.startswith("step 9") and "mean of 2" in tip
    assert not any(word in tip for word in ("…", "null", "NaN", "undefined"))
    assert page.run("/NaN|Infinity|undefined/.test(document.getElementById('curves').innerHTML)") is False
    assert page.errors == []


OWN_SUMMARIES = [
    {"accuracy_after": 0.5},
    {"accuracy_before": "low", "accuracy_after": "high"},
    {"gain": 0.25, "parameters": [1, 2], "held_out": None},
    {"gain": {"mean": 0.25}, "parameters": "few"},
]
"""Numbers that a loop of one's own gives a name that the page knows."""


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("summary", OWN_SUMMARIES, ids=range(len(OWN_SUMMARIES)))
def test_whatever_a_loop_calls_its_numbers_the_page_is_whole(page, tmp_path, summary, seeds):
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(seeds)]
    for folder in runs:
        (folder / "summary.json").write_text(json.dumps({"result": "done", **summary}))
    write_report(runs, tmp_path / "r.html")
    page.errors.clear()
    page.open(tmp_path / "r.html", 1440)
    assert page.errors == [] and page.run("document.getElementById('options') !== null")


def test_a_held_out_completion_that_failed_is_in_the_table(page, tmp_path):
    folder = write_run(tmp_path / "a")
    row = {"prompt": [3, 4], "completion": "", "answer": ["4", "four"], "reward": None, "failed": "error"}
    write_lines(folder / "samples.json", [{"before": {"greedy": [row]}, "after": {"greedy": [row]}}])
    write_report([folder], tmp_path / "r.html")
    page.errors.clear()
    page.open(tmp_path / "r.html", 1440)
    assert page.errors == [] and page.run("document.getElementById('options') !== null")
    text = page.run("document.getElementById('samples').innerText")
    assert all(part in text for part in ("– · error", "[3, 4]", '["4", "four"]'))


def choose(page, label, value):
    page.run(
        f"(() => {{ const s = [...document.querySelectorAll('label')].find((l) => l.innerText.startsWith('{label}'))"
        f".querySelector('select'); s.value = '{value}'; s.dispatchEvent(new Event('change')); }})()"
    )


def test_another_clock_and_log_axes(page, file):
    page.open(file, 1440)
    choose(page, "Over", "tokens")
    page.run("document.querySelector('#curves .plot').focus()")
    page.key("End")
    assert "tokens trained on 4000" in page.run("document.querySelector('#curves .tip').innerText")
    before = page.run("document.querySelector('#curves .plot path:last-of-type').getAttribute('d')")
    page.run("[...document.querySelectorAll('label')].find((l) => l.innerText === 'log x').firstChild.click()")
    assert page.run("document.querySelector('#curves .plot path:last-of-type').getAttribute('d')") != before
    assert page.run("/NaN|Infinity/.test(document.getElementById('curves').innerHTML)") is False


def test_a_token_tells_the_numbers_of_the_file(page, file):
    page.open(file, 1440)
    wanted = sample(30)["tokens"]
    page.point("#completions .token:nth-of-type(2)")
    found = page.run(
        "Object.fromEntries([...document.querySelectorAll('.numbers dl > div')]"
        ".map((pair) => [...pair.children].map((part) => part.innerText)))"
    )
    assert found["token"] == '"2"' and found["token id"] == str(wanted["id"][1])
    assert float(found["log-prob"]) == wanted["logprob"][1] and float(found["ratio"]) == wanted["ratio"][1]
    assert float(found["advantage"]) == wanted["advantage"][1] and found["weights version"] == "30"
    page.run("document.querySelector('#completions .tokens').focus()")
    page.key("Home")
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert page.run("document.querySelector('.numbers dd').innerText") == '"</script>"'
    colour = "getComputedStyle(document.querySelector('#completions .token')).backgroundColor"
    by_advantage = page.run(colour)
    choose(page, "Colour by", "entropy")
    assert page.run(colour) != by_advantage
    page.run("document.querySelector('[aria-label=\"Earlier step\"]').click()")
    assert page.run("document.querySelector('#completions output').innerText") == "step 20"


def test_a_study_is_drawn(page, tmp_path):
    write_report([write_study(tmp_path / "study", goals=2)], tmp_path / "r.html")
    page.errors.clear()
    for width in (1440, 390):
        page.open(tmp_path / "r.html", width, mobile=width < 500)
        assert page.run(OVERFLOW) <= 0 and page.errors == []
        # History, front, a slice a parameter, and all of them together.
        assert page.run("document.querySelectorAll('#studies figure').length") == 5
        assert page.run("document.querySelectorAll('#studies figure')[0].querySelectorAll('circle').length") == 10
        assert page.run("/NaN|Infinity|undefined/.test(document.getElementById('studies').innerHTML)") is False
        assert page.run("document.querySelectorAll('#studies tbody:last-of-type tr').length") >= 12
        assert "U+202E" in page.run("document.getElementById('studies').innerText")


def test_an_open_page_follows_a_run(page, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, finished=False)
    write_report([folder], tmp_path / "r.html", reload_seconds=0.2)
    page.open(tmp_path / "r.html", 800)
    lines = [{"stage": "policy", "step": step, "seconds": float(step), "reward": 1.0} for step in range(9)]
    write_lines(folder / "metrics.jsonl", lines)
    write_report([folder], tmp_path / "r.html")
    page._until("the newer page", lambda found: found.get("method") == "Page.loadEventFired")
    assert page.run("content.runs[0].records") == 9


def test_the_committed_report_opens(page):
    assert COMMITTED.stat().st_size < 2_000_000
    page.errors.clear()
    page.open(COMMITTED, 390, mobile=True)
    assert page.run(OVERFLOW) <= 0 and page.errors == []
