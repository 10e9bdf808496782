"""What no interleaving may break: of a sample that is trained on, of every moment, and of a run that has ended."""

import itertools

from rl_bridge.rollout.ahead.ledger import State
from tests.bridge.rollout.ahead.simulated_engine import answered, most_likely, natural_length, token, words


def check_trained(world, group, place, sample):
    """Invariants of a sample that is trained on."""
    setting, step, where = world.setting, world.training.step, f"prompt {group.number}, sample {place}"
    natural, limit = natural_length(sample.seed), setting.pace.limit
    if setting.turns:
        _check_turns(setting, sample, where)
    elif sample.reason != "abort":
        assert len(sample.tokens) == min(natural, limit), f"{where} is cut or goes on after its end"
        assert sample.reason == ("stop" if natural <= limit else "length"), where
    else:
        assert world.spent[group.number, place] > setting.pace.seconds, f"{where} was given up too early"
        assert len(sample.tokens) < min(natural, limit), f"{where} had ended before it was given up"
    greedy = setting.greedy and place == setting.samples
    assert sample.greedy == greedy, f"{where}: a greedy sample is trained on, or a sampled one compared with"
    wanted = State.COMPARED if greedy else State.DROPPED if sample.reason == "abort" else State.TRAINED
    assert sample.state is wanted, f"{where} is {sample.state} after its step"
    drawn = range(len(sample.tokens))
    assert sample.tokens == [
        most_likely(group.number, i) if greedy else token(group.number, sample.seed, i) for i in drawn
    ], f"{where}: tokens are lost, doubled or another sample's"
    assert sample.versions == [-logprob for logprob in sample.logprobs], f"{where}: a span has another version"
    assert sample.versions == sorted(sample.versions), f"{where}: versions fall"
    assert setting.pace.partial or len(sample.spans) == 1, f"{where}: a whole completion of several versions"
    assert sample.rewards == {"reward": float(sum(sample.tokens))}, where
    staleness = [step - version for version in sample.versions]
    assert all(0 <= age <= setting.max_staleness for age in staleness), f"{where}: staleness {staleness}"
    if setting.truncated and sample.tokens:
        assert [tuple(ids) for ids in sample.allowed] == [(t, t + 1) for t in sample.tokens], where
    elif not setting.truncated:
        assert sample.allowed is None


def _check_turns(setting, sample, where):
    """Each turn has its tokens behind what the environment said before it, and no turn is lost or doubled."""
    wanted, drawn = [], 0
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


def check_row(world, row):
    """Invariants of a row that goes into an engine. Drawn tokens are positive, those of an environment negative."""
    said = len(list(itertools.takewhile(lambda token: token > 0, reversed(row.tokens))))
    assert row.said == said, f"{row.key}: {row.said} tokens of the turn that goes on, and it has {said}"
    assert row.limit >= 1, f"{row.key} has no room"
    over = said and not row.greedy and world.setting.ends(row.seed, row.drawn)
    assert not over, f"{row.key} goes in again behind its end"


def check_call(world, numbers):
    """ROLL-12: one call of the rewards has all prompts that wait; where nothing may depend on time, a step's.

    There rewards that look at each sample by itself are asked as soon as a prompt is drawn, and in order.
    """
    waiting = [number for number, group in world.ledger.groups.items() if group.all_in(State.REWARDING)]
    count = world.setting.prompts
    if world.setting.pace.deterministic and world.setting.apart:
        scored = [number for number, group in world.ledger.groups.items() if group.all_in(State.READY)]
        first = world.ledger.head + len(scored)
        assert scored == list(range(world.ledger.head, first)), f"{scored} were scored out of order"
        waiting = [number for place, number in enumerate(waiting) if number == first + place]
    elif world.setting.pace.deterministic:
        steps = [list(range(first, first + count)) for first in range(0, world.ledger.opened, count)]
        waiting = next((step for step in steps if set(step) <= set(waiting)), [])
    assert numbers == waiting, f"the rewards are asked about {numbers} where {waiting} wait"


def check_moment(world):
    """Invariants of every moment."""
    for key in world.ledger.keys(State.ASKING, State.WAITING, State.RUNNING):
        spent = world.spent[key]
        assert abs(world.ledger[key].seconds - spent) < 1e-6, f"engines spent {spent} s on {key}: {world.ledger[key]}"
    rounds = world.setting.pace.rounds
    assert rounds is None or max(world.beside.values(), default=0) <= rounds, f"rounds beside a step: {world.beside}"
    counts = world.ledger.counts()
    assert sum(counts.values()) == world.ledger.opened * world.setting.of_a_prompt, f"a sample is in no state: {counts}"
    running = set(world.ledger.keys(State.RUNNING))
    if world.pump.alive and not world.busy:
        assert set(world.engine.rows) == running, "the engine has other rows than the ledger says"
    if world.pump.held:
        assert not running, "weights may change while rows run"


def check_end(world):
    """Invariants of a run that has ended."""
    setting = world.setting
    trained = [(number, place) for content in world.history.values() for number, place, *_ in content]
    everything = [(n, s) for n in range(setting.steps * setting.prompts) for s in range(setting.of_a_prompt)]
    assert len(trained) == len(everything) and sorted(trained) == everything, "a prompt is lost or doubled"
    assert [len(world.history[step]) for step in range(setting.steps)] == (
        [setting.prompts * setting.of_a_prompt] * setting.steps
    )
    if setting.window == 1:
        assert trained == everything, "the order is not that of the ledger"
    lengths = {(n, s): len(tokens) for content in world.history.values() for n, s, tokens, *_ in content}
    greedy = world.ledger.finished["compared"]
    assert greedy == setting.greedy * setting.steps * setting.prompts, f"{greedy} greedy samples were compared with"
    assert lengths == {key: world.generated[key] for key in lengths} and not world.ledger.groups
