"""The law over every causal family of transformers: right to 1e-5, padded by itself, or refused by name.

Never wrong in silence (ENG-1, 4, 5, 11, 14, 15, 16, MUS-1, MUSA-1, 4, 5). ``make test`` runs the law over each kind of
family in one process; ``make test-families`` over all, and over two ranks.
"""

import pytest
import transformers

from tests.bridge.families import page, zoo
from tests.bridge.families.cells import NONE, PADDED, REFUSED, RIGHT, WRONG, Cell, cell, judged, names
from tests.bridge.families.columns import COLUMNS
from tests.bridge.families.measure import cells_of
from tests.bridge.families.ranks import AXES, measured_by_ranks

SHORT = (
    *("llama", "gemma2", "gpt_oss", "mixtral", "lfm2", "qwen3_next", "nemotron_h", "falcon_h1", "gpt_neox"),
    *("stablelm", "deepseek_v3", "mistral", "cohere2", "phi3"),
)
"""Each kind of family: these in ``make test``."""
MADE = tuple(kind for kind in zoo.FAMILIES if zoo.reason(kind) is None)
WANTED = (
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama", "mistral", "mixtral"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "glm4", "deepseek_v3", "gpt_oss"),
    *("granite", "granitemoehybrid", "smollm3", "lfm2", "nemotron_h", "falcon_h1", "gpt2", "gpt_neox", "cohere2"),
)
"""Families that are right, not merely refused."""
RIGHT_IN = ("load", "padded", "decoder", "lora", "export", "shard")
"""Columns that they are right in; packed, they may fall back to padding."""

RECORDED = page.results()
same_transformers = pytest.mark.skipif(
    RECORDED["versions"]["transformers"] != transformers.__version__, reason="the table is of another transformers"
)


@same_transformers
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long, id=kind) for kind in MADE]
)
def test_a_family_is_as_the_table_says_and_never_wrong(kind):
    found = cells_of(kind, COLUMNS)
    assert not {name: cell.text() for name, cell in found.items() if cell.verdict == WRONG}
    assert {name: cell.verdict for name, cell in found.items()} == {
        name: RECORDED["families"][kind][name][0] for name in COLUMNS
    }


@pytest.mark.long
@same_transformers
@pytest.mark.parametrize("part", range(4))
def test_two_ranks_are_as_the_table_says_and_never_wrong(part):
    kinds = MADE[part::4]
    found = measured_by_ranks(kinds)
    wrong = {(kind, name): cell.text() for kind in kinds for name, cell in found[kind].items() if cell.verdict == WRONG}
    assert not wrong
    assert {kind: {name: cell.verdict for name, cell in found[kind].items()} for kind in kinds} == {
        kind: {name: RECORDED["families"][kind][name][0] for name in AXES} for kind in kinds
    }


@pytest.mark.long
@same_transformers
def test_tied_nested_and_raising_layers_over_two_ranks():
    """Embeddings tied into a layer, a layer within a layer, and a first way that raises: FSDP takes all of them."""
    found = measured_by_ranks(("bert", "mamba", "llama4_text"), ("shard",))
    assert {kind: cells["shard"].verdict for kind, cells in found.items()} == dict.fromkeys(found, RIGHT)


@pytest.mark.parametrize("kind", WANTED)
def test_the_families_that_matter_are_right_and_not_merely_refused(kind):
    verdicts = {name: verdict for name, (verdict, _) in RECORDED["families"][kind].items()}
    assert {name: verdicts[name] for name in RIGHT_IN} == dict.fromkeys(RIGHT_IN, RIGHT)
    assert {verdicts["packed"], verdicts["shared"]} <= {RIGHT, PADDED}


@same_transformers
def test_no_family_is_left_out():
    assert set(RECORDED["families"]) == set(MADE)
    assert RECORDED["not made"] == {kind: zoo.reason(kind) for kind in zoo.FAMILIES if zoo.reason(kind) is not None}
    verdicts = {verdict for cells in RECORDED["families"].values() for verdict, _ in cells.values()}
    assert verdicts <= {RIGHT, PADDED, REFUSED, NONE}
    assert all(set(cells) == {*COLUMNS, *AXES} for cells in RECORDED["families"].values())


def test_the_page_is_what_the_results_say():
    assert page.PAGE.read_text("utf-8") == page.markdown(RECORDED), "python -m tests.bridge.families.table --page"


def test_a_refusal_is_by_name_and_while_building():
    """The law's own eyes: wrong numbers, other errors, and a refusal without a name are wrong."""
    model = zoo.tiny("llama")

    def raises(error):
        raise error

    assert judged({"values": 0.5, "gradients": 0.9}).verdict == RIGHT
    assert judged({"values": 0.5, "gradients": 1.1}) == Cell(WRONG, "gradients", 1.1)
    assert judged({"values": float("nan")}).verdict == WRONG
    assert cell(model, lambda: raises(ValueError("LlamaForCausalLM has no plan"))).verdict == WRONG
    assert cell(model, lambda: raises(KeyError("weight"))).verdict == WRONG
    assert names(model, "LlamaModel has no plan") and not names(model, "there is no plan")


@pytest.mark.long
def test_a_zoo_model_is_a_function_of_its_seed_and_shows_faults():
    """Two makings are equal; another seed is another model; no family's logits are flat or without context."""
    import torch

    ids = torch.arange(4, 20)[None]
    other = ids.clone()
    other[0, 0] = 30
    for kind in SHORT:
        with torch.no_grad():
            first, again, second = (
                m(input_ids=ids, use_cache=False).logits for m in map(zoo.tiny, (kind,) * 3, (0, 0, 1))
            )
            moved = zoo.tiny(kind)(input_ids=other, use_cache=False).logits[0, 3:] - first[0, 3:]
        assert torch.equal(first, again) and not torch.equal(first, second), kind
        assert float(first.std()) > 0.3 and float(moved.abs().max()) > 0.05, kind
