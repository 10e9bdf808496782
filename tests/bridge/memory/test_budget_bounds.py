"""What a budget learns at its bounds, what memory a control group leaves, and when a call may be made again."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_bridge.memory import token_budget
from rl_bridge.memory.token_budget import LEAST, MOST, TokenBudget, optimizer_within_memory, update_counts
from tests.bridge.memory.shortage import SHORT

CPU = torch.device("cpu")
PLENTY = {"base": 0, "peak": 1, "room": 1 << 40}
STATES = st.builds(
    lambda sizes, failures: TokenBudget(tokens=min(sizes), ceiling=max(sizes), failures=failures),
    st.tuples(st.integers(LEAST, MOST), st.integers(LEAST, MOST)),
    st.integers(0, 9),
)


@pytest.mark.parametrize(("used", "factor"), [(499, 1), (500, 2), (1000, 2), (3000, 2)])
def test_it_at_most_doubles_and_only_where_half_of_it_was_used(used, factor):
    budget = TokenBudget(tokens=1000)
    budget.measured(**PLENTY, tokens=used)
    assert budget.tokens == factor * 1000


@given(budget=STATES, base=st.integers(0, 100), peak=st.integers(0, 200), room=st.integers(0, 200), data=st.data())
def test_it_stays_between_the_least_and_what_memory_was_short_of(budget, base, peak, room, data):
    before, used = TokenBudget(**budget.learnt()), data.draw(st.integers(0, 2 * budget.tokens))
    budget.measured(base=base, peak=peak, room=room, tokens=used)
    assert LEAST <= budget.tokens <= min(2 * before.tokens, before.ceiling)
    assert (budget.ceiling, budget.failures) == (before.ceiling, before.failures)
    if not used or not room:
        assert budget.tokens == before.tokens


@pytest.mark.parametrize("unknown", [{"room": 0}, {"tokens": 0}], ids=str)
def test_of_a_step_without_tokens_or_of_unknown_room_nothing_is_learnt(unknown):
    budget = TokenBudget(tokens=1000)
    budget.measured(**{"base": 1, "peak": 9, "room": 10, "tokens": 1000} | unknown)
    assert budget == TokenBudget(tokens=1000)


@given(base=st.integers(0, 100), took=st.integers(1, 200), room=st.integers(1, 200), tokens=st.integers(LEAST, MOST))
@example(base=0, took=20, room=1, tokens=4096)
def test_where_there_is_not_room_for_as_many_tokens_it_falls_to_those_that_fit(base, took, room, tokens):
    """However little room there is."""
    budget = TokenBudget(tokens=tokens)
    budget.measured(base=base, peak=base + took, room=room, tokens=tokens)
    fit = int((0.8 * room - base) / (took / tokens))
    if fit < tokens:
        assert budget.tokens == max(LEAST, fit)


def test_a_step_that_took_nothing_or_gave_memory_back_leaves_it_room():
    for peak in (5, 10):
        budget = TokenBudget(tokens=1000)
        budget.measured(base=10, peak=peak, room=1, tokens=1000)
        assert budget.tokens == 2000


@given(tokens=st.integers(LEAST, MOST))
@example(tokens=LEAST + 1)
@example(tokens=LEAST + 6)
def test_where_memory_was_short_half_are_tried_and_three_quarters_never_exceeded(tokens):
    budget = TokenBudget(tokens=tokens)
    again = budget.failed()
    assert again == (tokens > LEAST) and budget.failures == 1
    assert budget.tokens == max(LEAST, tokens // 2)
    assert budget.ceiling == (max(LEAST, 3 * tokens // 4) if again else MOST)
    for _ in range(3):
        budget.measured(**PLENTY, tokens=budget.tokens)
    assert budget.tokens <= max(LEAST, 3 * tokens // 4) or not again


@given(budget=STATES)
def test_a_budget_that_goes_on_is_the_one_that_was_saved(budget):
    other = TokenBudget()
    other.go_on(budget.learnt())
    assert other == budget


@pytest.mark.parametrize(
    ("limit", "usage", "free"),
    [("max", "7", 1000), ("600", "200", 400), ("600", "900", 0), ("5000", "200", 1000), (None, "7", 1000)],
    ids=["no limit", "within", "above it", "more than there is", "no group"],
)
def test_a_control_group_takes_away_what_it_does_not_leave(tmp_path, monkeypatch, limit, usage, free):
    monkeypatch.setattr(token_budget, "_CGROUP", tmp_path)
    monkeypatch.setattr(token_budget, "in_use", lambda device: 50)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    (tmp_path / "memory.current").write_text(f"{usage}\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert token_budget.room(CPU) == 50 + free


class Module:
    """A module whose call is short of memory ``shortages`` times."""

    trainable = True

    def __init__(self, shortages, *, mesh=None, gradient=False, tokens=4 * LEAST):
        self.budget, self._mesh = TokenBudget(tokens=tokens), mesh
        self.shortages, self.gradient, self.tries = shortages, gradient, []

    largest_micro_batch = 2 * LEAST

    def compute_device(self):
        return CPU

    def _has_gradient(self):
        return self.gradient

    def _whole(self, step):
        return step()

    def run(self, rows):
        self.tries.append((rows, self.budget.tokens))
        if len(self.tries) <= self.shortages:
            raise RuntimeError(SHORT)
        return rows

    train_step = token_budget.within_memory(run)
    score = token_budget.scores_within_memory(run)


@pytest.fixture
def memory(monkeypatch):
    """Memory that a call takes; the list of collections between two tries."""
    collections = []
    monkeypatch.setattr(token_budget, "collect", collections.append)
    for name, value in {"in_use": 0, "peak": 2 * LEAST, "room": 1 << 30}.items():
        monkeypatch.setattr(token_budget, name, lambda device, value=value: value)
    return collections


@pytest.mark.parametrize("method", ["train_step", "score"])
@pytest.mark.parametrize("shortages", [0, 1, 2])
def test_a_call_is_made_again_with_half_as_often_as_memory_is_short(memory, method, shortages):
    module = Module(shortages)
    assert getattr(module, method)("rows") == "rows"
    assert module.tries == [("rows", 4 * LEAST >> number) for number in range(shortages + 1)]
    assert len(memory) == shortages == module.budget.failures


def test_a_call_is_given_up_at_the_least_budget(memory):
    module = Module(9)
    with pytest.raises(RuntimeError, match="can't allocate"):
        module.score("rows")
    assert [tokens for _, tokens in module.tries] == [4 * LEAST, 2 * LEAST, LEAST]


@pytest.mark.parametrize(
    ("method", "state", "tries"),
    [
        ("train_step", {"mesh": object()}, 1),
        ("train_step", {"gradient": True}, 1),
        ("score", {"mesh": object()}, 1),
        ("score", {"gradient": True}, 2),
    ],
    ids=["in a mesh", "beside gradients", "scored in a mesh", "scored beside gradients"],
)
def test_a_call_that_others_or_earlier_gradients_are_part_of_is_not_made_again(memory, method, state, tries):
    module = Module(1, **state)
    if tries == 1:
        with pytest.raises(RuntimeError, match="can't allocate"):
            getattr(module, method)("rows")
        assert module.budget.failures == 0
    else:
        assert getattr(module, method)("rows") == "rows"
    assert len(module.tries) == tries


@pytest.mark.parametrize(("method", "trainable"), [("train_step", True), ("score", True), ("score", False)])
def test_a_trained_module_s_budget_learns_from_its_steps_alone_and_a_frozen_one_s_from_scores(
    memory, method, trainable
):
    module = Module(0)
    module.trainable = trainable
    getattr(module, method)("rows")
    learns = method == "train_step" or not trainable
    assert module.budget.tokens == (8 if learns else 4) * LEAST


class Optimizer:
    """An optimiser that is short of memory at its first step, before or after it has begun."""

    def __init__(self, begins, state=None):
        self.state = {"a": {"step": 3.0}, "b": {}, "c": {"step": 0}} if state is None else state
        self.begins, self.steps = begins, 0

    def step(self):
        self.steps += 1
        if self.steps == 1:
            if self.begins:
                self.state["c"]["step"] = 1
            raise RuntimeError(SHORT)
        self.state["a"]["step"] += 1


def test_an_update_is_made_again_where_none_had_begun(memory):
    optimizer = Optimizer(begins=False)
    assert update_counts(optimizer) == {"a": 3.0}, "a state without an update is as good as none"
    optimizer_within_memory(optimizer, CPU)
    assert (optimizer.steps, update_counts(optimizer), memory) == (2, {"a": 4.0}, [CPU])
    begun = Optimizer(begins=True)
    with pytest.raises(RuntimeError, match="can't allocate"):
        optimizer_within_memory(begun, CPU)
    assert begun.steps == 1
