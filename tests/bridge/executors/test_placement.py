"""Placement: every wish that can be met is, against a search of all choices; others say what there is."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.executors import Slot
from rl_bridge.executors.placement import place

FOUR = [Slot(i, node=f"10.0.0.{i // 2}", device=f"cuda:{i % 2}", resources={"GPU": 1, "big": i // 3}) for i in range(4)]


def meets(chosen, colocate_with, not_colocate_with, nodes, resources, slots):
    """Whether a set of slots is what was asked for."""
    own = set(chosen)
    return (
        all(len(own & set(engine)) == min(len(own), len(engine)) for engine in colocate_with)
        and all(not own & set(engine) for engine in not_colocate_with)
        and all(nodes is None or slots[i].node in nodes for i in own)
        and all(slots[i].resources.get(name, 0) >= amount for i in own for name, amount in resources.items())
    )


@st.composite
def wishes(draw):
    count = draw(st.integers(1, 6))
    slots = [
        Slot(i, node=draw(st.sampled_from("ab")), resources={"GPU": draw(st.integers(0, 1))}) for i in range(count)
    ]
    engine = st.lists(st.integers(0, count - 1), min_size=1, unique=True)
    return slots, {
        "size": draw(st.integers(1, count)),
        "colocate_with": draw(st.lists(engine, max_size=2)),
        "not_colocate_with": draw(st.lists(engine, max_size=1)),
        "nodes": draw(st.sampled_from([None, ["a"], ["a", "b"]])),
        "resources": draw(st.sampled_from([{}, {"GPU": 1}])),
    }


@given(wishes(), st.dictionaries(st.integers(0, 5), st.just(["policy"])))
def test_a_wish_is_met_whenever_it_can_be(wish, occupied):
    slots, options = wish
    size = options["size"]
    rest = {key: value for key, value in options.items() if key != "size"}
    possible = [c for c in combinations(range(len(slots)), size) if meets(c, slots=slots, **rest)]
    try:
        chosen = place(slots, occupied=occupied, **options)
    except ValueError as error:
        assert not possible and f"{size} slots are needed" in str(error)
        assert all(f"slot {slot.index} (cpu on {slot.node}" in str(error) for slot in slots)
    else:
        assert len(set(chosen)) == size and tuple(sorted(chosen)) in possible
        if not rest["colocate_with"]:

            def cost(slots):
                return sum(bool(occupied.get(slot)) for slot in slots)

            assert cost(chosen) == min(map(cost, possible))


@pytest.mark.parametrize(
    ("size", "occupied", "options", "expected"),
    [
        (2, {}, {}, [0, 1]),
        (4, {}, {}, [0, 1, 2, 3]),
        (2, {0: ["policy"]}, {}, [2, 3]),  # one machine rather than slots 1 and 2
        (1, {0: ["policy"]}, {}, [1]),  # beside it, so that a machine stays free
        (3, {0: ["policy"]}, {}, [1, 2, 3]),
        (2, {0: ["a"], 1: ["a"], 2: ["b"], 3: ["b", "c"]}, {}, [0, 1]),
        (2, {}, {"colocate_with": [[3, 2]]}, [3, 2]),  # rank by rank
        (1, {}, {"colocate_with": [[3, 2]]}, [3]),
        (3, {3: ["a"]}, {"colocate_with": [[3]]}, [3, 0, 1]),
        (2, {}, {"colocate_with": [[0, 1, 2], [2, 1]]}, [2, 1]),
        (2, {}, {"colocate_with": [[3], [0]]}, [3, 0]),
        (2, {}, {"nodes": ["10.0.0.1"]}, [2, 3]),
        (1, {}, {"resources": {"big": 1}}, [3]),
        (2, {}, {"not_colocate_with": [[0], [2]]}, [1, 3]),
    ],
)
def test_which_slots(size, occupied, options, expected):
    assert place(FOUR, size, occupied=occupied, **options) == expected


def test_where_no_machine_has_enough_the_emptiest_machine_s_slots_are_taken_whole():
    """A machine with one engine is left with a free slot, and the free machine is used up."""
    six = [Slot(number, node=f"10.0.0.{number // 3}") for number in range(6)]
    assert place(six, 4, occupied={0: ["policy"]}) == [1, 3, 4, 5]
    assert place(six, 4, occupied={3: ["policy"]}) == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (5, {}, r"5 slots are needed \(no further wish\) and 4 fit"),
        (3, {"not_colocate_with": [[0, 1]]}, r"3 slots are needed \(not_colocate_with slots \[0, 1\]\) and 2 fit"),
        (
            1,
            {"colocate_with": [[0]], "not_colocate_with": [[0, 1]]},
            r"colocate_with slots \[0\]; not_colocate_with .* 0 fit",
        ),
        (1, {"colocate_with": [[0], [1]]}, r"colocate_with slots \[0\] and \[1\]\)"),
        (
            2,
            {"colocate_with": [[0, 1, 2], [2, 3, 1, 0]], "nodes": ["10.0.0.1"]},
            r"nodes \['10\.0\.0\.1'\]\) and 1 fit",
        ),
        (1, {"resources": {"big": 2}}, r"resources \{'big': 2\}\) and 0 fit"),
        (1, {"nodes": []}, r"nodes \[\]\) and 0 fit"),
    ],
)
def test_what_cannot_be_met_lists_slots_and_who_holds_them(size, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        place(FOUR, size, occupied={0: ["policy", "reference"], 1: ["policy"]}, **options)
    for words in ("slot 0 (cuda:0 on 10.0.0.0: policy, reference)", "slot 3 (cuda:1 on 10.0.0.1: free)"):
        assert words in str(caught.value)


def test_an_engine_has_a_slot():
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        place(FOUR, 0, occupied={})
