"""Each token is sampled by a request at an offset, or given; and what was sampled stays what the engine returned."""

import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Trajectory, single_turn, spans_of_turn

TURN = st.lists(st.tuples(st.integers(2, 90), st.integers(0, 3)), max_size=6)
"""Tokens and the version that drew each."""


def conversation(turns, between=(40, 41)):
    """Given tokens before each turn, and the turns."""
    tokens, mask, versions, spans = [], [], [], ()
    for number, turn in enumerate(turns):
        tokens += between
        mask += [False] * len(between)
        versions += [-1] * len(between)
        drawn, drew = [token for token, _ in turn], [version for _, version in turn]
        spans += spans_of_turn((3, 1), number, len(tokens), drawn, drew)
        tokens += drawn
        mask += [True] * len(turn)
        versions += drew
    fields = {"tokens": tokens, "loss_mask": mask, "weights_versions": versions, "logprobs": [-0.5] * len(tokens)}
    fields = {name: tuple(value) for name, value in fields.items()}
    return Trajectory(**fields, spans=spans, turns=len(turns), request_id=(3, 1), finish_reason="stop")


TURNS = st.lists(TURN, min_size=1, max_size=4)


@given(TURNS)
def test_every_token_has_one_origin(turns):
    t = conversation(turns)
    origin = {}
    for span in t.spans:
        for number, token in enumerate(span.drawn):
            assert origin.setdefault(span.start + number, (span.turn, span.offset + number)) == (
                span.turn,
                span.offset + number,
            )
            assert (t.tokens[span.start + number], t.weights_versions[span.start + number]) == (token, span.version)
    assert sorted(origin) == [place for place, drawn in enumerate(t.loss_mask) if drawn]
    assert sorted(origin.values()) == [(n, offset) for n, turn in enumerate(turns) for offset in range(len(turn))]
    t.require_sampled()
    pickle.loads(pickle.dumps(t)).require_sampled()


@given(TURNS.filter(lambda turns: any(turns)), st.data())
def test_a_token_that_drifted_is_named(turns, data):
    t = conversation(turns)
    drawn = [place for place, mine in enumerate(t.loss_mask) if mine]
    place = data.draw(st.sampled_from(drawn))
    tokens = (*t.tokens[:place], t.tokens[place] + 1, *t.tokens[place + 1 :])
    span = next(span for span in t.spans if span.start <= place < span.stop)
    said = (
        f"token {place} (request 3-1, turn {span.turn}, offset {span.offset + place - span.start}) is "
        f"{tokens[place]}, and the engine drew {t.tokens[place]}: "
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        collate([t, replace(t, tokens=tokens)], 0)


@given(TURNS.filter(lambda turns: any(turns)), st.data())
def test_a_given_token_never_counts_and_a_drawn_one_may_be_left_out(turns, data):
    t = conversation(turns)
    place = data.draw(st.sampled_from(range(1, len(t.tokens))))
    mask = (*t.loss_mask[:place], not t.loss_mask[place], *t.loss_mask[place + 1 :])
    changed = replace(t, loss_mask=mask)
    if t.loss_mask[place]:
        changed.require_sampled()
    else:
        with pytest.raises(ValueError, match=f"token {place} counts in the loss, and no request to the engine drew it"):
            collate([changed], 0)


def test_a_token_inserted_before_a_turn_moves_the_turn_away_from_its_span():
    t = conversation([[(5, 0)], [(6, 0), (7, 1)]])
    wider = {name: (*getattr(t, name)[:4], filler, *getattr(t, name)[4:]) for name, filler in FILLERS.items()}
    with pytest.raises(ValueError, match=r"token 5 \(request 3-1, turn 1, offset 0\) is 41, and the engine drew 6"):
        replace(t, **wider).require_sampled()
    shorter = {name: getattr(t, name)[:-1] for name in FILLERS}
    with pytest.raises(ValueError, match=r"token 6 .*turn 1, offset 1.* ends behind the 6 tokens"):
        replace(t, **shorter).require_sampled()


def test_what_stands_behind_the_last_turn_does_not_count():
    t = conversation([[(5, 0)]])
    longer = {name: (*getattr(t, name), filler) for name, filler in FILLERS.items()}
    replace(t, **longer).require_sampled()
    with pytest.raises(ValueError, match="token 3 counts in the loss, and no request to the engine drew it"):
        replace(t, **longer | {"loss_mask": (*t.loss_mask, True)}).require_sampled()


FILLERS = {"tokens": 40, "loss_mask": False, "logprobs": 0.0, "weights_versions": -1}


def test_a_version_that_did_not_draw_the_token_is_refused():
    t = single_turn([4, 5], [6, 7, 8], logprobs=[-1.0] * 3, version=[1, 2, 2], request_id=(9,))
    t.require_sampled()
    assert [(s.offset, s.version, list(s.drawn)) for s in t.spans] == [(0, 1, [6]), (1, 2, [7, 8])]
    with pytest.raises(
        ValueError, match=r"token 3 \(request 9, turn 0, offset 1\) has weights version 1, and version 2"
    ):
        replace(t, weights_versions=(-1, -1, 1, 1, 2)).require_sampled()
    with pytest.raises(ValueError, match="request \\(9,\\), turn 0: 2 versions for 3 tokens"):
        spans_of_turn((9,), 0, 2, [6, 7, 8], [1, 2])


def test_rows_that_no_engine_made_are_not_checked():
    collate([single_turn([4], [5, 6])], 0)
