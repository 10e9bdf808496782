"""Trainer, engine, rewards and disk around the pumps in virtual time: a seed decides every delay and every accident."""

import heapq
import json
import random
from collections import Counter

from rl_bridge.rollout.ahead.ledger import Ledger, State, Turn, loaded, saved
from rl_bridge.rollout.ahead.pumps import Admission, Advance, Restart, RolloutPump, TrainingPump, Withdraw
from tests.bridge.rollout.ahead.invariants import check_call, check_end, check_moment, check_row, check_trained
from tests.bridge.rollout.ahead.simulated_engine import SimulatedEngine, answered, mixed
from tests.bridge.rollout.ahead.simulated_server import ServedSimulation


class Stuck(AssertionError):
    """Nothing is about to happen, and the run has not ended."""


class World:
    """One run. ``history`` has what each step trained on."""

    def __init__(self, setting, seed):
        self.setting, self.random = setting, random.Random(f"world {seed}")
        self.now, self.events, self.count, self.generation = 0.0, [], 0, 0
        self.disk, self.history, self.done = None, {}, False
        self.crashes, self.deaths, self.forgets = setting.crashes, setting.deaths, setting.forgets
        self.generated = {}
        self.spent_on_disk = {}
        self.waits, self.began_anew, self.ended_unseen = 0, 0, 0
        # One kind of delay dominates in each run.
        self.pace = {
            name: self.random.choice([0.1, 1.0, 10.0])
            for name in ("engine", "trainer", "reward", "update", "environment")
        }
        for _ in range(self.crashes):
            self.after(self.random.uniform(0, 100), self.crash, anyway=True)
        self.start()

    def after(self, delay, action, *args, anyway=False):
        self.count += 1
        generation = None if anyway else self.generation
        heapq.heappush(self.events, (self.now + delay, self.count, generation, action, args))

    def delay(self, what):
        return self.pace[what] * self.random.expovariate(1.0)

    def prompt(self, number):
        return number, [mixed(number, sample) for sample in range(self.setting.of_a_prompt)]

    def start(self):
        setting = self.setting
        self.admission = Admission(
            max_staleness=setting.max_staleness,
            prompts_per_step=setting.prompts,
            window=setting.window,
            steps=setting.steps,
        )
        if self.disk is None:
            self.ledger, step = Ledger(), 0
        else:
            # Written some time after it was taken, as by a thread: what has happened since is not to be seen in it.
            state = json.loads(json.dumps(self.disk))
            self.ledger, step = loaded(state["ledger"], lambda number: self.prompt(number)[0]), state["step"]
        self.history = {done: content for done, content in self.history.items() if done < step}
        kind = {"talks": setting.turns > 0, "greedy": setting.greedy, "apart": setting.apart}
        self.pump = RolloutPump(self.ledger, self.admission, setting.pace, self.prompt, **kind)
        self.training = TrainingPump(self.ledger, self.admission, step)
        self.engine, self.busy = self.opened(), False
        self.spent, self.since = Counter(self.spent_on_disk), {}
        self.beside, self.scoring = Counter(), []
        self.trainer = "end" if step == setting.steps else "update"

    def opened(self):
        """Another engine, without weights."""
        setting = self.setting
        if setting.served:
            return ServedSimulation(setting.ends, setting.truncated, self.random)
        return SimulatedEngine(setting.ends, setting.truncated)

    def crash(self):
        """The process is killed: what is not on the disk is gone."""
        if not self.done:
            self.generation += 1
            self.start()

    def run(self):
        self.poke()
        for _ in range(20_000):
            if self.done:
                check_end(self)
                return self
            if not self.events:
                raise Stuck(f"{self.trainer}, held {self.pump.held}, {self.ledger.counts()}")
            self.now, _, generation, action, args = heapq.heappop(self.events)
            if generation is None or generation == self.generation:
                action(*args)
                self.poke()
                check_moment(self)
        raise Stuck("20000 events, and no end")

    def poke(self):
        """Everyone does what can be done now."""
        self.poke_engine()
        was_scoring = bool(self.scoring)
        for key in self.pump.to_ask():
            assert self.ledger[key].state is State.ASKING, f"{key} is asked for a second answer"
            self.after(self.delay("environment"), self.environment_answers, key, self.ledger[key].beginnings)
        if not self.scoring:
            self.scoring = [group.number for group in self.pump.to_score()]
            check_call(self, self.scoring)
        if self.scoring and not was_scoring:
            self.after(self.delay("reward"), self.scored)
        self.poke_trainer()

    def poke_engine(self):
        command = self.pump.next(self.now)
        if command is not None:
            assert not self.busy
            self.busy = True
            for row in command.rows if isinstance(command, Advance) else ():
                check_row(self, row)
                self.since[row.key] = self.now
            self.after(self.delay("engine"), self.engine_done, command, self.pump.epoch)

    def hold(self):
        """Whether nobody draws."""
        self.pump.hold()
        self.poke_engine()
        return self.pump.held and self.pump.alive and not self.busy

    def engine_done(self, command, epoch):
        self.busy = False
        if isinstance(command, Restart):
            self.engine = self.opened()
            self.pump.restarted()
            return
        answer = self.engine.run(command)
        self.ended_unseen += isinstance(command, Withdraw) and any(row.reason is not None for row in answer)
        if self.deaths and self.random.random() < 0.1:
            self.deaths -= 1
            self.since.clear()
            self.pump.died(epoch)
            # The answer was on its way, and comes after all: it must not count twice.
            self.after(self.delay("engine"), self.late, epoch, answer)
            return
        for row in answer:
            self.spent[row.key] += self.now - self.since.pop(row.key)
        version = self.pump.version
        self.beside[version] += isinstance(command, Advance) and self.is_drawn(version)
        assert self.pump.answered(epoch, answer, self.now)

    def is_drawn(self, step):
        """Whether the engine is done with what a step takes in order."""
        end = (step + 1) * self.setting.prompts
        undrawn = self.ledger.keys(State.ASKING, State.WAITING, State.RUNNING)
        return self.ledger.opened >= end and all(number >= end for number, _ in undrawn)

    def environment_answers(self, key, beginning):
        """A conversation has so many turns as the setting says; now and then an environment has forgotten it."""
        group = self.ledger.groups.get(key[0])
        sample = None if group is None else group.samples[key[1]]
        if sample is None or sample.beginnings != beginning:
            self.began_anew += 1
            assert not self.pump.told(key, beginning, Turn([], None, True, None), "stop")
        elif sample.turns and self.forgets and self.random.random() < 0.1:
            self.forgets, self.began_anew = self.forgets - 1, self.began_anew + 1
            self.pump.cannot_go_on(key, beginning)
        else:
            turn = len(sample.turns)
            done = turn == self.setting.turns
            given = [] if done else answered(sample.seed, turn)
            room = 0 if done else self.setting.pace.limit
            answer = Turn([{"role": "tool", "content": str(turn)}], float(turn), done, turn, [], given, room)
            assert self.pump.told(key, beginning, answer, "stop" if done else None)

    def late(self, epoch, answer):
        assert not self.pump.answered(epoch, answer, self.now)

    def scored(self):
        numbers, self.scoring = self.scoring, []
        for number in numbers:
            samples = self.ledger.groups[number].samples
            for place, sample in enumerate(samples):
                self.generated[number, place] = len(sample.tokens)
            self.pump.scored(number, [{"reward": float(sum(sample.tokens))} for sample in samples])

    def poke_trainer(self):
        setting = self.setting
        if self.trainer == "update":
            if setting.lazy and not self.pump.held and self.training.batch() is not None and not self.pump.idle():
                self.begin()
            elif setting.lazy and not self.pump.held and not self.pump.idle():
                return
            elif self.hold():
                self.trainer = "updating"
                self.after(self.delay("update"), self.updated, self.pump.epoch)
        elif self.trainer == "wait":
            if self.training.batch() is not None:
                self.begin()
            elif self.pump.held or (setting.lazy and self.pump.idle() and self.pump.version < self.training.step):
                self.trainer = "update"
                self.poke_trainer()
            else:
                self.waits += 1
        elif self.trainer == "save":
            if setting.pace.deterministic and not self.hold():
                return
            self.spent_on_disk = dict(self.spent)
            self.disk = {"ledger": saved(self.ledger), "step": self.training.step}
            self.trainer = "end" if self.training.step == setting.steps else "update"
            self.poke_trainer()
        elif self.trainer == "end":
            self.done = True

    def updated(self, epoch):
        if epoch != self.pump.epoch:
            self.trainer = "update"
            return
        self.engine.version = self.training.step
        self.pump.release(self.training.step)
        self.trainer = "wait"

    def begin(self):
        self.trainer = "training"
        content = []
        for group in self.training.take():
            for place, sample in enumerate(group.samples):
                content.append((group.number, place, tuple(sample.tokens), tuple(sample.spans), sample.reason))
                check_trained(self, group, place, sample)
        self.history[self.training.step] = content
        self.after(self.delay("trainer"), self.trained)

    def trained(self):
        self.training.trained()
        step = self.training.step
        saves = step % self.setting.checkpoint_every == 0 or step == self.setting.steps
        self.trainer = "save" if saves else "update"
