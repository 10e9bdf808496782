"""Pumps with one command, for the driver's tests."""


class OneCommand:
    """A pump that is held at once, and has one command."""

    held = alive = True
    epoch, has_to_ask, version = 0, False, 0

    def __init__(self):
        self.commands = ["advance"]

    def hold(self):
        pass

    def next(self, now):
        return self.commands.pop() if self.commands else None

    def to_score(self):
        return []

    def answered(self, epoch, ended, now):
        return True


class Scored(OneCommand):
    """A pump one of whose prompts is scored."""

    def __init__(self):
        super().__init__()
        self.waiting = ["group"]

    def to_score(self):
        found, self.waiting = self.waiting, []
        return found
