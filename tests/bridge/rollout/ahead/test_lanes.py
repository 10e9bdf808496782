"""Several workers as one engine: each sample has its worker, in every call and after every update."""

from types import SimpleNamespace

import pytest

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.ahead.lanes import Lanes
from rl_bridge.rollout.ahead.ledger import Tokens
from rl_bridge.rollout.ahead.pumps import Advance, Ended, Row, Withdraw

SAMPLING = SamplingParams(max_new_tokens=3)


class Workers:
    """An engine and its executor, which answer with what each worker was asked."""

    name, slots, workers = "rollout", [4, 7], 2
    methods = dict.fromkeys(("advance", "withdraw", "restart"))

    def __init__(self):
        self.executor, self.calls = self, []

    def call(self, function, arguments, *, what):
        self.calls.append((what, {slot: given[2] for slot, given in arguments.items()}))
        ended = {}
        for slot, (_, method, given, _, _) in arguments.items():
            rows = given[0] if method == "advance" else ()
            ended[slot] = [Ended(row.key, Tokens([slot], [0.0], None), "stop") for row in rows] or None
        return ended


def row(number, sample):
    return Row((number, sample), SimpleNamespace(tokens=[number]), (), drawn=0, said=0, seed=1, limit=3)


def test_a_sample_s_worker_depends_on_its_number_alone():
    workers = Workers()
    lanes = Lanes(workers, SAMPLING, samples=3)
    keys = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (5, 2)]
    ended = lanes.do(Advance(tuple(row(*key) for key in keys), 8))
    assert {one.key: one.drawn.tokens for one in ended} == {
        (0, 0): [4], (0, 1): [7], (0, 2): [4], (1, 0): [7], (1, 1): [4], (5, 2): [7],
    }  # fmt: skip
    assert lanes.do(Advance((row(1, 0),), 8))[0].drawn.tokens == [7]
    what, given = workers.calls[0]
    assert what == "rollout.advance" and [r.prompt for r in given[4][0]] == [[0], [0], [1]]
    assert given[4][1:] == given[7][1:] == (SAMPLING, 8, False)


def test_a_greedy_row_goes_to_its_worker_as_one():
    workers = Workers()
    Lanes(workers, SAMPLING, samples=3).do(Advance((row(0, 1), row(0, 2)._replace(greedy=True)), 8))
    assert [[r.greedy for r in given[0]] for _, given in sorted(workers.calls[0][1].items())] == [[True], [False]]


def test_all_workers_are_asked_to_withdraw_and_to_restart():
    workers = Workers()
    lanes = Lanes(workers, SAMPLING, samples=2)
    assert lanes.do(Withdraw(((0, 0), (3, 1)))) == []
    lanes.restart()
    assert workers.calls == [
        ("rollout.withdraw", {4: (((0, 0), (3, 1)),), 7: (((0, 0), (3, 1)),)}),
        ("rollout.restart", {4: (), 7: ()}),
    ]


def test_workers_that_cannot_give_rows_back():
    workers = Workers()
    workers.methods = {"advance": None}
    with pytest.raises(ValueError, match="the workers of rollout cannot run ahead: they have no restart, withdraw"):
        Lanes(workers, SAMPLING, samples=2)
