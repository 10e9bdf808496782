"""Faults planted in the state machines: the simulation finds each of them."""

import pytest

from rl_bridge.rollout import rollout_worker
from rl_bridge.rollout.ahead import ledger as saving
from rl_bridge.rollout.ahead.ledger import Ledger, Sample, State
from rl_bridge.rollout.ahead.pumps import Admission, RolloutPump, TrainingPump
from rl_bridge.rollout.served.served_engine import ServedDecoder
from tests.bridge.rollout.ahead import simulation
from tests.bridge.rollout.ahead.exploring import explore, same_each_time

FAULTS = {}


def fault(of, name):
    """Replace the method or function ``name`` of ``of`` by what the decorated function makes of it."""

    def plant(make):
        FAULTS[make.__name__] = (of, name, make)
        return make

    return plant


@fault(Admission, "limit")
def admits_one_prompt_too_many(limit):
    return lambda self, version: min(limit(self, version) + 1, self.steps * self.prompts_per_step)


@fault(Admission, "limit")
def counts_from_what_was_opened_last(limit):
    return lambda self, version: limit(self, version + 1)


@fault(RolloutPump, "_admit")
def forgets_the_tokens_so_far(admit):
    return lambda self, now, **begun: [row._replace(tokens=(), drawn=0) for row in admit(self, now, **begun)]


@fault(RolloutPump, "_admit")
def gives_the_whole_limit_again(admit):
    return lambda self, now, **begun: [row._replace(limit=self.pace.limit) for row in admit(self, now, **begun)]


@fault(Sample, "append")
def stamps_the_last_version_on_all_tokens(append):
    def appended(self, drawn, version):
        append(self, drawn, version)
        self.spans = [(version, len(self.tokens))] if self.tokens else []

    return appended


@fault(Sample, "append")
def stamps_the_first_version_on_all_tokens(append):
    def appended(self, drawn, version):
        append(self, drawn, self.spans[0][0] if self.spans else version)

    return appended


@fault(RolloutPump, "answered")
def takes_the_answer_of_a_dead_engine(answered):
    return lambda self, epoch, rows, now: answered(self, self.epoch, rows, now)


@fault(RolloutPump, "died")
def forgets_the_rows_of_a_dead_engine(died):
    def dying(self, epoch):
        self.alive, self.held, self._pending, self.epoch = False, True, None, self.epoch + 1

    return dying


@fault(RolloutPump, "died")
def goes_on_with_an_engine_without_weights(died):
    def dying(self, epoch):
        died(self, epoch)
        self.held = False

    return dying


@fault(RolloutPump, "_may_stop")
def interrupts_whole_completions(may_stop):
    return lambda self, running: not self.pace.deterministic or may_stop(self, running)


@fault(RolloutPump, "_may_stop")
def never_stops(may_stop):
    return lambda self, running: False


@fault(RolloutPump, "_command")
def says_held_while_rows_run(command):
    def commanded(self, now):
        self.held = self.held or self._wanted
        return None if self.held else command(self, now)

    return commanded


@fault(RolloutPump, "to_score")
def asks_for_rewards_twice(to_score):
    def asked(self):
        found = to_score(self)
        return [*found, *found[:1]]

    return asked


@fault(RolloutPump, "to_score")
def scores_a_step_when_its_last_prompt_is_drawn(to_score):
    def asked(self):
        self._apart = False
        return to_score(self)

    return asked


@fault(RolloutPump, "scored")
def swaps_rewards(scored):
    return lambda self, number, rewards: scored(self, number, rewards[::-1])


@fault(TrainingPump, "batch")
def trains_in_the_order_of_arrival(batch):
    def chosen(self):
        ready = [number for number, group in self.ledger.groups.items() if group.all_in(State.READY)]
        enough = len(ready) >= self.admission.prompts_per_step
        return ready[: self.admission.prompts_per_step] if enough else None

    return chosen


@fault(TrainingPump, "batch")
def throws_old_prompts_away(batch):
    def chosen(self):
        groups = self.ledger.groups
        for number in [n for n, group in groups.items() if group.all_in(State.READY) and group.admitted < self.step]:
            groups.pop(number)
        return batch(self)

    return chosen


@fault(Ledger, "returned")
def cuts_a_token_at_an_update(returned):
    def back(self, key, drawn, version, now):
        drawn = drawn._replace(tokens=drawn.tokens[:-1], logprobs=drawn.logprobs[:-1])
        returned(self, key, drawn, version, now)

    return back


@fault(saving, "_sample")
def saves_running_samples_as_running(sample):
    return lambda saved: {**sample(saved), "state": str(saved.state)}


@fault(saving, "_sample")
def saves_no_spans(sample):
    return lambda saved: {**sample(saved), "spans": []}


@fault(saving, "_sample")
def saves_lists_that_go_on_changing(sample):
    return lambda saved: {**sample(saved), **{name: getattr(saved, name) for name in saving.PLAIN}}


@fault(simulation, "saved")
def saves_only_what_is_ready(saved):
    def less(ledger):
        state = saved(ledger)
        ready = [g for g in state["groups"] if all(s["state"] == "ready" for s in g["samples"])]
        return {**state, "groups": ready}

    return less


@fault(RolloutPump, "_is_gone")
def takes_what_an_earlier_beginning_was_answered(is_gone):
    return lambda self, key, beginning: False


@fault(RolloutPump, "_begin_again_what_is_older")
def goes_on_with_turns_of_another_version(begin_again):
    return lambda self, version: None


@fault(RolloutPump, "_begun")
def changes_weights_between_two_turns(begun):
    return lambda self: []


@fault(RolloutPump, "to_ask")
def asks_an_environment_twice(to_ask):
    def asked(self):
        found = to_ask(self)
        return [*found, *found[:1]]

    return asked


@fault(Ledger, "begin_again")
def begins_again_with_what_was_said(begin_again):
    def again(self, key):
        turns = self[key].turns
        begin_again(self, key)
        self[key].turns = turns

    return again


@fault(Ledger, "begin_again")
def begins_a_greedy_conversation_again_as_a_sampled_one(begin_again):
    def again(self, key):
        begin_again(self, key)
        self[key].greedy = False

    return again


@fault(RolloutPump, "_admit")
def samples_a_greedy_row(admit):
    return lambda self, now, **begun: [row._replace(greedy=False) for row in admit(self, now, **begun)]


@fault(saving, "_of")
def loads_a_greedy_sample_as_a_sampled_one(of):
    return lambda saved: of({**saved, "greedy": False})


@fault(Ledger, "open")
def makes_the_first_sample_greedy(opened):
    def opening(self, *given, **options):
        group = opened(self, *given, **options)
        group.samples[0].greedy, group.samples[-1].greedy = group.samples[-1].greedy, group.samples[0].greedy
        return group

    return opening


@fault(Sample, "room")
def gives_every_turn_its_whole_room_after_an_update(room):
    return lambda self, limit: self.turns[-1].room if self.turns else room(self, limit)


@fault(saving, "_of")
def loads_no_turns(of):
    return lambda saved: of({**saved, "turns": []})


@fault(RolloutPump, "_admit")
def looks_for_stop_texts_in_all_that_was_said(admit):
    """SURV-5: a turn could end at once, by what stands before it."""
    return lambda self, now, **begun: [row._replace(said=len(row.tokens)) for row in admit(self, now, **begun)]


@fault(Ledger, "begin_again")
def forgets_the_seconds_of_a_conversation_that_begins_anew(begin_again):
    """SURV-6."""

    def again(self, key):
        begin_again(self, key)
        self[key].seconds = 0.0

    return again


@fault(saving, "_of")
def forgets_the_seconds_of_a_killed_run(of):
    """SURV-6."""
    return lambda saved: of({**saved, "seconds": 0.0})


@fault(RolloutPump, "restarted")
def counts_the_rounds_anew_after_a_death(restarted):
    def again(self):
        restarted(self)
        self._beside = 0

    return again


@fault(rollout_worker, "_ended")
def takes_rows_that_have_ended_for_unfinished(ended):
    """ROLL-1: a server draws between two commands, and a full row or one behind its stop token went in again."""
    return lambda drawn: ended(drawn)._replace(reason=None)


FIRST = {"counts_the_rounds_anew_after_a_death": 1600, "takes_what_an_earlier_beginning_was_answered": 430}
"""Seed of a world in which a rare fault shows, so that nobody waits for it."""


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, name):
    of, method, make = FAULTS[name]
    monkeypatch.setattr(of, method, make(getattr(of, method)))
    with pytest.raises(AssertionError, match=r"World\(setting_of\("):
        explore(range(FIRST.get(name, 0), 2000))


def stops_when_asked(may_stop):
    return lambda self, running: (self.pace.partial and self._wanted) or may_stop(self, running)


def counts_the_rounds_while_it_waits(answered):
    def counted(self, epoch, rows, now):
        self._beside += int(now) % 2
        return answered(self, epoch, rows, now)

    return counted


def draws_while_environments_think(command):
    def commanded(self, now):
        asking = list(self.ledger.keys(State.ASKING))
        for key in asking:
            self.ledger[key].state = State.REWARDING
        try:
            return command(self, now)
        finally:
            for key in asking:
                self.ledger[key].state = State.ASKING

    return commanded


def draws_on_beside_the_rounds(draw_in_rounds):
    """ROLL-2: what a version drew on a server depended on how long a training step took."""
    return lambda self: None


@pytest.mark.parametrize(
    ("of", "method", "make"),
    [
        (RolloutPump, "_may_stop", stops_when_asked),
        (RolloutPump, "answered", counts_the_rounds_while_it_waits),
        (RolloutPump, "_command", draws_while_environments_think),
        (ServedDecoder, "draw_in_rounds", draws_on_beside_the_rounds),
    ],
)
def test_a_run_that_depends_on_delays_is_found(monkeypatch, of, method, make):
    monkeypatch.setattr(of, method, make(getattr(of, method)))
    with pytest.raises(AssertionError, match="seed"):
        same_each_time(range(300))
