"""Trainer, engine, rewards and disk around the pumps in virtual time: a seed decides every delay and every accident."""

import heapq
import itertools
import json
import random
from dataclasses import dataclass

from rl_bridge.rollout.asynchronous.admission import Admission
from rl_bridge.rollout.asynchronous.ledger import Ledger, State, Tokens, Turn
from rl_bridge.rollout.asynchronous.rollout_pump import Advance, Ended, Pace, Restart, RolloutPump
from rl_bridge.rollout.asynchronous.saving import loaded, saved
from rl_bridge.rollout.asynchronous.training_pump import TrainingPump


def mixed(*numbers):
    state = 0x9E3779B9
    for number in numbers:
        state = (state ^ (number + 0x7F4A7C15)) * 0x2545F491 & 0xFFFFFFFF
        state ^= state >> 13
    return state


def natural_length(seed):
    """Most completions are short, and a few are very long."""
    return min(60, 1 + int(3 / (1 - mixed(seed, 7) / 2**32) ** 0.9))


def token(prompt, seed, number):
    return 1 + mixed(prompt, seed, number) % 50


def words(seed, turn):
    """Tokens of the policy in a turn of a conversation, if its limit is not smaller."""
    return 1 + mixed(seed, turn, 5) % 9


def answered(seed, turn):
    """What the environment says before the policy's turn: negative, so that nobody takes them for drawn ones."""
    return [-1 - mixed(seed, turn, number) % 50 for number in range(1 + mixed(seed, turn, 3) % 3)]


class SimulatedEngine:
    """Draws what prompt, seed and number of the draw say; a log-probability is minus the weights' version.

    ``end``: whether a row stops after so many drawn tokens.
    """

    def __init__(self, end, truncated=False):
        self.version, self.rows, self.end, self.truncated = None, {}, end, truncated

    def put(self, row):
        assert row.key not in self.rows, f"{row.key} is in the engine already"
        assert row.limit >= 1, row
        self.rows[row.key] = row, []

    def step(self):
        assert self.version is not None or not self.rows, "rows in an engine without weights"
        ended = []
        for key, (row, drawn) in list(self.rows.items()):
            number = row.drawn + len(drawn)
            drawn.append((token(row.prompt, row.seed, number), -float(self.version)))
            stops = self.end(row.seed, number + 1)
            if stops or len(drawn) == row.limit:
                ended.append(self.leave(key, "stop" if stops else "length"))
        return ended

    def leave(self, key, reason):
        _, drawn = self.rows.pop(key)
        tokens = [token for token, _ in drawn]
        allowed = [(token, token + 1) for token in tokens] if self.truncated else None
        return Ended(key, Tokens(tokens, [logprob for _, logprob in drawn], allowed), reason)

    def run(self, command):
        if isinstance(command, Advance):
            for row in command.rows:
                self.put(row)
            return [ended for _ in range(command.steps) if self.rows for ended in self.step()]
        return [self.leave(key, None) for key in command.keys]


@dataclass(frozen=True)
class Setting:
    """What is simulated. Accidents come at random and only so often."""

    max_staleness: int = 1
    pace: Pace = Pace(limit=40, steps=4)
    window: int = 1
    prompts: int = 2
    samples: int = 2
    steps: int = 6
    crashes: int = 0
    deaths: int = 0
    forgets: int = 0
    """Environments that begin again, so that their conversations do."""
    checkpoint_every: int = 2
    lazy: bool = False
    """The trainer goes on without an update where the engine is busy and its own prompts are ready."""
    truncated: bool = False
    turns: int = 0
    """Of a conversation; 0: completions."""

    def ends(self, seed, count):
        """Whether the policy stops after so many tokens that it drew."""
        if not self.turns:
            return count == natural_length(seed)
        ends = list(itertools.accumulate(words(seed, turn) for turn in range(self.turns)))
        return count in ends


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
        self.waits, self.began_anew = 0, 0
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
        return number, [mixed(number, sample) for sample in range(self.setting.samples)]

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
        self.pump = RolloutPump(self.ledger, self.admission, setting.pace, self.prompt, talks=setting.turns > 0)
        self.training = TrainingPump(self.ledger, self.admission, step)
        self.engine, self.busy = SimulatedEngine(setting.ends, setting.truncated), False
        self.trainer = "end" if step == setting.steps else "update"

    def crash(self):
        """The process is killed: what is not on the disk is gone."""
        if not self.done:
            self.generation += 1
            self.start()

    def run(self):
        self.poke()
        for _ in range(20_000):
            if self.done:
                self.ended()
                return self
            if not self.events:
                raise Stuck(f"{self.trainer}, held {self.pump.held}, {self.ledger.counts()}")
            self.now, _, generation, action, args = heapq.heappop(self.events)
            if generation is None or generation == self.generation:
                action(*args)
                self.poke()
                self.check()
        raise Stuck("20000 events, and no end")

    def poke(self):
        """Everyone does what can be done now."""
        self.poke_engine()
        for key in self.pump.to_ask():
            assert self.ledger[key].state is State.ASKING, f"{key} is asked for a second answer"
            self.after(self.delay("environment"), self.environment_answers, key, self.ledger[key].beginnings)
        for group in self.pump.to_score():
            self.after(self.delay("reward"), self.scored, group.number)
        self.poke_trainer()

    def poke_engine(self):
        command = self.pump.next(self.now)
        if command is not None:
            assert not self.busy
            self.busy = True
            self.after(self.delay("engine"), self.engine_done, command, self.pump.epoch)

    def hold(self):
        """Whether nobody draws."""
        self.pump.hold()
        self.poke_engine()
        return self.pump.held and self.pump.alive and not self.busy

    def engine_done(self, command, epoch):
        self.busy = False
        if isinstance(command, Restart):
            self.engine = SimulatedEngine(self.setting.ends, self.setting.truncated)
            self.pump.restarted()
            return
        answer = self.engine.run(command)
        if self.deaths and self.random.random() < 0.1:
            self.deaths -= 1
            self.pump.died(epoch)
            # The answer was on its way, and comes after all: it must not count twice.
            self.after(self.delay("engine"), self.late, epoch, answer)
            return
        assert self.pump.answered(epoch, answer, self.now)

    def environment_answers(self, key, beginning):
        """A conversation has so many turns as the setting says; now and then an environment has forgotten it."""
        sample = self.ledger[key]
        if sample.beginnings != beginning:
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

    def scored(self, number):
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
                self.right(group, place, sample)
        self.history[self.training.step] = content
        self.after(self.delay("trainer"), self.trained)

    def trained(self):
        self.training.trained()
        step = self.training.step
        saves = step % self.setting.checkpoint_every == 0 or step == self.setting.steps
        self.trainer = "save" if saves else "update"

    def right(self, group, place, sample):
        """Invariants of a sample that is trained on."""
        step, where = self.training.step, f"prompt {group.number}, sample {place}"
        natural, limit = natural_length(sample.seed), self.setting.pace.limit
        if self.setting.turns:
            self.right_turns(sample, where)
        elif sample.reason != "abort":
            assert len(sample.tokens) == min(natural, limit), f"{where} is cut or goes on after its end"
            assert sample.reason == ("stop" if natural <= limit else "length"), where
        assert sample.tokens == [token(group.number, sample.seed, i) for i in range(len(sample.tokens))], (
            f"{where}: tokens are lost, doubled or another sample's"
        )
        assert sample.versions == [-logprob for logprob in sample.logprobs], f"{where}: a span has another version"
        assert sample.versions == sorted(sample.versions), f"{where}: versions fall"
        assert self.setting.pace.partial or len(sample.spans) == 1, f"{where}: a whole completion of several versions"
        assert sample.rewards == {"reward": float(sum(sample.tokens))}, where
        staleness = [step - version for version in sample.versions]
        assert all(0 <= age <= self.setting.max_staleness for age in staleness), f"{where}: staleness {staleness}"
        if self.setting.truncated and sample.tokens:
            assert [tuple(ids) for ids in sample.allowed] == [(t, t + 1) for t in sample.tokens], where
        elif not self.setting.truncated:
            assert sample.allowed is None

    def right_turns(self, sample, where):
        """Each turn has its tokens behind what the environment said before it, and no turn is lost or doubled."""
        setting, wanted, drawn = self.setting, [], 0
        assert [turn.state_id for turn in sample.turns] == list(range(len(sample.turns))), f"{where}: turns {sample}"
        for number, turn in enumerate(sample.turns):
            last = number == len(sample.turns) - 1
            whole = 0 if number == setting.turns else min(words(sample.seed, number), setting.pace.limit)
            assert turn.drawn == whole or (last and sample.reason == "abort" and turn.drawn < whole), where
            wanted += turn.given + sample.tokens[drawn : drawn + turn.drawn]
            drawn += turn.drawn
            assert turn.given == ([] if number == setting.turns else answered(sample.seed, number)), where
        assert sample.sequence == wanted and drawn == len(sample.tokens), f"{where}: tokens in no turn"
        if sample.reason == "stop":
            assert len(sample.turns) == setting.turns + 1 and sample.turns[-1].done, f"{where} ends early"

    def check(self):
        """Invariants of every moment."""
        counts = self.ledger.counts()
        assert sum(counts.values()) == self.ledger.opened * self.setting.samples, f"a sample is in no state: {counts}"
        running = set(self.ledger.keys(State.RUNNING))
        if self.pump.alive and not self.busy:
            assert set(self.engine.rows) == running, "the engine has other rows than the ledger says"
        if self.pump.held:
            assert not running, "weights may change while rows run"

    def ended(self):
        """Invariants of a run that has ended."""
        setting = self.setting
        trained = [(number, place) for content in self.history.values() for number, place, *_ in content]
        everything = [(n, s) for n in range(setting.steps * setting.prompts) for s in range(setting.samples)]
        assert len(trained) == len(everything) and sorted(trained) == everything, "a prompt is lost or doubled"
        assert [len(self.history[step]) for step in range(setting.steps)] == (
            [setting.prompts * setting.samples] * setting.steps
        )
        if setting.window == 1:
            assert trained == everything, "the order is not that of the ledger"
        lengths = {(n, s): len(tokens) for content in self.history.values() for n, s, tokens, *_ in content}
        assert lengths == {key: self.generated[key] for key in lengths} and not self.ledger.groups


def setting_of(seed):
    """A setting drawn at random: every mode, with and without accidents."""
    choose = random.Random(f"setting {seed}")
    staleness = choose.choice([0, 1, 1, 2, 3])
    mode = choose.choice(["drain", "rounds", "rounds", "free", "free", "free", "free whole", "free lazy"])
    limit, steps = choose.choice([5, 40, 1000]), choose.choice([1, 1, 3, 8])
    pace = {
        "drain": Pace(limit=limit, steps=steps),
        "rounds": Pace(partial=True, rounds=choose.choice([1, 2, 5]), limit=limit, steps=steps),
        "free": Pace(partial=True, deterministic=False, limit=limit, steps=steps,
                     seconds=choose.choice([None, None, 2.0, 30.0])),
        "free whole": Pace(deterministic=False, limit=limit, steps=steps),
        "free lazy": Pace(deterministic=False, limit=limit, steps=steps),
    }[mode]  # fmt: skip
    prompts = choose.choice([1, 2, 3])
    window = 1 if pace.deterministic or not staleness else choose.choice([1, 2, prompts * staleness + 1])
    return Setting(
        max_staleness=staleness,
        pace=pace,
        window=window,
        prompts=prompts,
        samples=choose.choice([1, 2, 3]),
        steps=choose.choice([1, 4, 7]),
        crashes=choose.choice([0, 0, 1, 4]),
        deaths=choose.choice([0, 0, 1, 3]),
        checkpoint_every=choose.choice([1, 2, 5]),
        lazy=mode == "free lazy",
        truncated=choose.random() < 0.3,
        turns=choose.choice([0, 0, 1, 3]),
        forgets=choose.choice([0, 0, 2]) if not pace.deterministic else 0,
    )
