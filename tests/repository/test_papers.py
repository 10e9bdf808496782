"""docs/papers.md is what the docstrings and the tests say, and the citations hold together."""

import re

import pytest

import rl_fn
from tests.repository.papers import (
    ID,
    NUMBERS,
    PAGE,
    PAPERS,
    QUOTED,
    READ,
    ROOT,
    files_of,
    page,
    papers_of_names,
    public_docs,
)

CITED = papers_of_names()
# What the design asks of each public name that a paper stands behind.
WANTED = {
    "1506.02438": ["gae"],
    "1606.02647": ["retrace"],
    "1707.06347": ["ppo_clip", "recipes.ppo"],
    "1802.01561": ["vtrace"],
    "1912.09729": ["ppo_clip"],
    "2306.13649": ["gkd", "jensen_shannon"],
    "2310.10505": ["remax_advantages"],
    "2402.03300": ["grpo_advantages", "recipes.grpo"],
    "2402.14740": ["rloo_advantages", "recipes.rloo"],
    "2405.19107": ["dro"],
    "2501.03262": ["reinforce_pp_advantages", "reinforce_pp_baseline_advantages"],
    "2501.12599": ["kimi"],
    "2503.14286": ["topr"],
    "2503.14476": ["recipes.dapo", "overlong_penalty", "group_filter"],
    "2503.20783": ["recipes.dr_grpo", "grpo_advantages"],
    "2504.02546": ["gpg_advantages", "gpg_loss"],
    "2504.05118": ["length_adaptive_lambda"],
    "2505.10978": ["step_group_advantages"],
    "2505.22617": ["clip_cov", "kl_cov"],
    "2505.23585": ["opo_advantages"],
    "2505.24298": ["decoupled_ppo"],
    "2506.01939": ["high_entropy_mask"],
    "2506.13585": ["cispo"],
    "2507.18071": ["gspo", "gspo_token", "log_ratio"],
    "2507.20673": ["gmpo"],
    "2508.10751": ["passk_analytic_advantages"],
    "2510.01161": ["second_moment_mask"],
    "2511.20347": ["sapo"],
    "2512.02556": ["off_policy_sequence_mask", "kl_importance_corrected"],
    "2601.05242": ["gdpo_advantages"],
    "2602.02710": ["maxrl_advantages"],
    "2602.04879": ["dppo"],
    "2602.05261": ["luspo"],
    "2602.10693": ["vespo"],
    "2603.01365": ["total_variation_mask"],
}


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.repository.papers writes it anew"


def test_every_id_in_the_sources_has_a_title_and_a_row():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "rl_fn").rglob("*.py")]
    assert {key for text in texts for key in ID.findall(text)} == set(PAPERS)
    assert {key for ids in CITED.values() for key in ids} == set(PAPERS)
    assert list(PAPERS) == sorted(PAPERS)


@pytest.mark.parametrize("key", WANTED)
def test_a_name_with_a_paper_cites_it(key):
    assert [name for name in WANTED[key] if key not in CITED[name]] == []


@pytest.mark.parametrize(
    "name", sorted(name for name, ids in CITED.items() if ids and name.removeprefix("recipes.")[0].islower())
)
def test_a_name_with_a_paper_is_tested(name):
    files = files_of(name)
    assert files and all((ROOT / "tests" / f"{file}.py").exists() for file in files)


@pytest.mark.parametrize("name", sorted(CITED))
def test_author_and_id_belong_together(name):
    """Where a docstring says "Someone et al. (NAME), arXiv ID", that someone is the paper's first author."""
    text = " ".join(public_docs()[name].split())
    for author, key in re.findall(r"([\w'’-]+(?: \w+)?) et al\.(?: \([^)]*\))?, arXiv (\d{4}\.\d{4,5})", text):
        assert author.endswith(PAPERS[key][0]), (author, key)


def test_numbers_are_those_of_papers_that_were_looked_up():
    """A title alone does not tell which equation is meant."""
    docs = {name: " ".join(doc.split()) for name, doc in public_docs().items()}
    numbered = {(name, key) for name, doc in docs.items() for key in NUMBERS.findall(doc)}
    assert ("gae", "1506.02438") in numbered
    assert {(name, key) for name, key in numbered if key not in READ | QUOTED} == set()
    assert set(PAPERS) >= READ | QUOTED
    assert not READ & QUOTED


def test_every_function_says_where_it_is_from():
    for name, doc in public_docs().items():
        if name[0].islower():
            assert re.search(r"Reference:\n\s+\S", doc), name
    assert {*rl_fn.__all__, *(f"recipes.{name}" for name in rl_fn.recipes.__all__)} >= set(CITED)
