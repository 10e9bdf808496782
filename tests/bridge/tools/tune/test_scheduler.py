"""The scheduler in a world of its own: thousands of orders of ends, kills, crashes, hangs and restarts, by seed."""

import random
import zlib

import pytest

from rl_tools.tune.goals import MissingGoal, Pruning, parse_constraint, parse_goal
from rl_tools.tune.journal import Key, State
from rl_tools.tune.samplers import Result
from rl_tools.tune.scheduler import Exit, Plan, Scheduler

STEPS = 4
NONE = Pruning()
GOAL = parse_goal("reward", maximize=True)
LIMITED = parse_constraint("kl<=0.5")


class Killed(BaseException):
    """SIGKILL of the tuner."""


class World:
    """Disk, machines and time: what outlives a tuner. ``fate`` of a run is its own: crash, hang, or neither."""

    def __init__(self, seed, slots):
        self.random, self.slots = random.Random(seed), slots
        self.journal, self.done, self.running = [], {}, {}
        self.exits, self.now, self.kills, self.outside = [], 0.0, 0, 0
        self.calls, self.unsealed = [], []

    def fate(self, key):
        return {(1, 1): "crash", (2, 0): "hang"}.get(key, "fine")

    # What the scheduler is given.
    def write(self, event):
        self.maybe_kill()
        self.journal.append(event)
        # What a sampler wrote before an event holds with the event, or not at all.
        self.calls, self.unsealed = [*self.calls, *self.unsealed], []
        self.maybe_kill()

    def start(self, key, assignment, slot):
        assert key not in self.running and self.done.get(key, 0) < STEPS, "a run is started twice, or after its end"
        assert slot not in self.running.values() and 0 <= slot < self.slots
        self.running[key] = slot
        self.done.setdefault(key, 0)
        self.maybe_kill()

    def stop(self, key):
        if key in self.running and self.random.random() < 0.8:
            self.end(key, -15)

    def ended(self):
        found, self.exits = self.exits, []
        return found

    def recover(self, key):
        assert key not in self.running
        return self.left.get(key)

    def finished(self, key):
        return self.done.get(key, 0) >= STEPS

    def values(self, key):
        return {"reward": 1.0 - 0.1 * key.trial, "kl": 0.2 * key.trial}

    def curve(self, key):
        return dict.fromkeys(range(self.done.get(key, 0)), 0.1 * key.trial - 1.0)

    def steps(self, key):
        return self.done.get(key, 0)

    # What happens by itself.
    def maybe_kill(self):
        if self.kills < 6 and self.random.random() < 0.04:
            raise Killed

    def end(self, key, code):
        del self.running[key]
        self.exits.append(Exit(key, code, "Boom: the last line" if code == 1 else ""))

    def advance(self):
        hangs = all(self.fate(key) == "hang" and self.done[key] == 2 for key in self.running)
        self.now += 30 if hangs else self.random.random() * 4
        for key in list(self.running):
            fate, done, chance = self.fate(key), self.done[key], self.random.random()
            if fate == "crash" and done == 1:
                self.end(key, 1)
            elif chance < 0.03:
                self.outside += 1
                self.end(key, -9)
            elif chance < 0.7 and not (fate == "hang" and done == 2):
                self.done[key] += 1
                if self.done[key] == STEPS:
                    self.end(key, 0)

    def tuner_is_gone(self):
        """Guards end what runs; some runs reach their end before, and of some nobody knows."""
        self.kills += 1
        self.left = {e.key: e for e in self.exits if self.random.random() < 0.5}
        for key in list(self.running):
            if self.done[key] == STEPS - 1 and self.random.random() < 0.5 and self.fate(key) == "fine":
                self.done[key] = STEPS
            if self.random.random() < 0.5:
                self.left[key] = Exit(key, 0 if self.done[key] == STEPS else -15)
            del self.running[key]
        self.exits, self.unsealed = [], []


class Remembering:
    """Proposes a number that depends on all calls so far, in their order; they are in the world's journal."""

    def __init__(self, world, trials):
        self.world, self.trials = world, trials

    def _write(self, *call):
        self.world.unsealed.append(call)
        self.world.maybe_kill()

    def ask(self, number):
        if number >= self.trials:
            return None
        known = zlib.crc32(repr([self.world.calls, self.world.unsealed]).encode())
        self._write("asked", number)
        return {"x": known}

    def tell(self, number, result: Result):
        self._write("told", number, result)


def play(seed, *, pruning=NONE, trials=4, seeds=2, kills=True, confirm=0):
    """A study to its end, with as many restarts as it takes; returns the world and the folded state."""
    world = World(seed, slots=1 + seed % 3)
    limits = {"time_limit": 60, "retries": 50, "pruning": pruning, "confirm": confirm}
    plan = Plan((GOAL,), (LIMITED,), trials + seed % 2, seeds, world.slots, **limits)
    world.kills = 0 if kills else 6
    world.left = {}
    for _ in range(50):
        try:
            sampler = Remembering(world, trials)
            study = Scheduler(plan, sampler, world, world, world.write, list(world.journal))
            study.recover(world.now)
            for _ in range(2000):
                if study.step(world.now):
                    break
                assert len(world.running) <= world.slots
                world.advance()
            else:
                raise AssertionError("the study does not end")
            break
        except Killed:
            world.tuner_is_gone()
    heard = [(event["kind"], event["trial"]) for event in world.journal if event["kind"] in ("asked", "told")]
    assert [call[:2] for call in world.calls] == heard, "the sampler's trials are those of the journal"
    state = State(seeds)
    for event in world.journal:
        state.fold(event)
    assert len(state.trials) == trials and not world.running
    return world, state


@pytest.mark.parametrize(("kind", "studies"), [("none", 400), ("paired", 200), ("asha", 200)])
def test_no_order_of_kills_loses_or_repeats_a_trial(kind, studies):
    """State.fold and World.start refuse what is there twice; here it is all there, and with the right end."""
    pruning = Pruning(kind, least_steps=2, pairs=2, factor=2)
    restarts, seen = 0, set()
    for seed in range(studies):
        world, state = play(seed, pruning=pruning, seeds=3 if kind == "paired" else 2)
        restarts += world.kills
        told = [event for event in world.journal if event["kind"] == "told"]
        assert sorted(event["trial"] for event in told) == list(range(4))
        for trial in state.trials:
            statuses = {one.status for one in trial.repetitions.values()}
            seen |= statuses
            fates = {world.fate(Key(trial.number, s)) for s in trial.repetitions}
            if kind == "none":
                assert trial.told["status"] == ("complete" if fates == {"fine"} else "failed"), (seed, trial)
            if trial.told["status"] == "complete":
                assert statuses == {"complete"} and trial.told["losses"] == [pytest.approx(0.1 * trial.number - 1)]
                assert trial.told["violations"] == [pytest.approx(0.2 * trial.number - 0.5)]
            else:
                assert trial.told["reason"] and not statuses & {"waiting", "running"}
    assert restarts > 2 * studies and seen >= {"complete", "failed" if kind == "none" else "pruned", "left out"}


def test_a_restart_does_not_change_the_study_with_one_process_at_a_time():
    """Whatever a sampler learns from, it hears in the same order."""
    for seed in range(0, 30, 3):
        alone, interrupted = (play(seed, kills=kills)[0] for kills in (False, True))
        told = [[e for e in w.journal if e["kind"] in ("asked", "told")] for w in (alone, interrupted)]
        assert told[0] == told[1] and alone.kills == 6


def test_a_crash_a_hang_and_a_run_that_others_kill_are_results_with_their_reasons():
    reasons, attempts = set(), 0
    for seed in range(20):
        world, state = play(seed, kills=False)
        for trial in state.trials:
            reasons |= {one.reason for one in trial.repetitions.values() if one.status == "failed"}
            attempts += sum(one.attempts for one in trial.repetitions.values())
        assert all(one.interruptions <= world.outside for t in state.trials for one in t.repetitions.values())
    assert reasons == {"exit status 1: Boom: the last line", "had not ended after 60 s"}


def killed_again_and_again(retries):
    world = World(0, 1)
    world.kills = 6
    plan = Plan((GOAL,), trials=1, retries=retries)
    study = Scheduler(plan, Remembering(world, 1), world, world, world.write)
    while not study.step(world.now):
        for key in list(world.running):
            world.end(key, -9)
    return study.state.trials[0]


def test_retries_have_an_end():
    trial = killed_again_and_again(2)
    assert trial.repetitions[0].attempts == 3 and trial.told["reason"] == "killed by signal 9, 3 times"


def journal_of(*losses, violations=()):
    """Trials that are complete, and one that runs."""
    found = []
    for number, loss in enumerate([*losses, None]):
        found.append({"kind": "asked", "trial": number, "assignment": {"x": number}})
        if loss is not None:
            told = {"kind": "told", "trial": number, "status": "complete", "losses": [loss]}
            found.append(told | {"violations": [violations[number]] if violations else []})
    return [*found, {"kind": "started", "trial": len(losses), "seed": 0, "slot": 0, "time": 0.0}]


class Silent:
    """A sampler that nobody asks."""

    def ask(self, number):
        return {"x": number}

    def tell(self, number, result):
        """Nothing is learned."""


def test_trials_are_compared_with_the_best_one_within_the_constraints():
    world = World(0, 1)
    events = journal_of(0.1, 0.3, 0.2, violations=[0.5, -1.0, -1.0])
    study = Scheduler(Plan((GOAL,), (LIMITED,), trials=4), Silent(), world, world, world.write, events)
    assert study.incumbent().number == 2


def test_what_ended_while_no_tuner_was_there_ends_as_it_did():
    world = World(0, 1)
    world.kills, world.left = 6, {Key(0, 0): Exit(Key(0, 0), 1, "Boom")}
    study = Scheduler(Plan((GOAL,), trials=1), Silent(), world, world, world.write, journal_of())
    study.recover(1.0)
    assert study.step(1.0) and study.state.trials[0].told["reason"] == "exit status 1: Boom"


def test_a_trial_is_none_of_those_that_it_is_compared_with():
    """Of two trials one goes on beyond the first rung: the second one, which is worse, is asked to stop."""
    _, state = play(0, pruning=Pruning("asha", least_steps=2, factor=2), trials=2, seeds=1, kills=False)
    first, second = (trial.repetitions[0].stopping for trial in state.trials)
    assert first is None and second["reason"] == "1 of 1 trials are better after 2 steps, and 1 go on"


def test_closing_starts_nothing_and_leaves_what_ran_to_be_taken_up():
    world = World(1, 2)
    world.kills = 6
    plan = Plan((GOAL,), trials=3, slots=2)
    study = Scheduler(plan, Remembering(world, 3), world, world, world.write)
    assert not study.step(0.0) and len(world.running) == 2
    study.close()
    for key in list(world.running):
        world.end(key, -15)
    assert study.step(1.0) and not world.running
    again = Scheduler(plan, Remembering(world, 3), world, world, world.write, list(world.journal))
    again.step(2.0)
    assert set(world.running) == {Key(0, 0), Key(1, 0)}


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"seeds": 0}, {"slots": 0}, {"retries": -1}, {"goals": ()}])
def test_a_plan_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        Plan(**({"goals": (GOAL,)} | wrong))


def test_pruning_by_several_goals_is_refused():
    with pytest.raises(ValueError, match="pruning compares one goal, got reward, kl"):
        Plan((GOAL, parse_goal("kl", maximize=False)), pruning=Pruning("asha"))
    with pytest.raises(ValueError, match="compares at least 3 seeds, got 2: give --seeds"):
        Plan((GOAL,), seeds=2, pruning=Pruning("paired"))


@pytest.mark.parametrize("seed", range(1, 41, 4))
def test_the_best_runs_again_with_fresh_seeds_however_often_the_tuner_is_killed(seed):
    """TOOL-6: --confirm N, after all trials, of the best alone; no sampler hears of it."""
    world, state = play(seed, confirm=2)
    best = min((t for t in state.trials if t.told["status"] == "complete"), key=lambda t: t.told["losses"][0])
    added = {t.number: sorted(t.repetitions)[2:] for t in state.trials}
    assert added == {t.number: [2, 3] if t is best else [] for t in state.trials}
    assert {best.repetitions[s].status for s in (2, 3)} == {"complete"} and world.kills
    kinds = [event["kind"] for event in world.journal]
    assert "told" not in kinds[kinds.index("confirming") :] and kinds.count("confirming") == 1


def test_a_goal_that_the_first_run_does_not_have_ends_the_study():
    """TOOL-8: what else runs is stopped, and nothing new is started; with a value somewhere the study goes on."""

    class Misspelt(World):
        def values(self, key):
            raise MissingGoal("no record and no summary has rewart; did you mean reward?")

    world = Misspelt(0, 2)
    world.kills = 6
    study = Scheduler(Plan((GOAL,), trials=5, slots=2), Remembering(world, 5), world, world, world.write)
    for _ in range(200):
        if study.step(world.now):
            break
        world.advance()
        if study.missing:
            for key in list(world.running):
                world.end(key, -15)
    assert study.missing is not None and "did you mean reward?" in study.missing
    assert len(study.state.trials) == 2 and not world.running
