"""An engine that draws what a few numbers decide, so that a lost, doubled or swapped token shows."""

from rl_bridge.rollout.ahead.ledger import Tokens
from rl_bridge.rollout.ahead.pumps import Advance, Ended


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


def most_likely(prompt, number):
    """A greedy row's token, whatever its seed: of no sampled row."""
    return 51 + mixed(prompt, number) % 50


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
            next_one = most_likely(row.prompt, number) if row.greedy else token(row.prompt, row.seed, number)
            drawn.append((next_one, -float(self.version)))
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
