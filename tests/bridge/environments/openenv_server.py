"""A game behind an OpenEnv server: say digits until their sum is the target. Usage: openenv_server.py PORT."""

import sys

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    heard: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()
        self.total, self.target = 0, 0

    def reset(self, seed=None, episode_id=None, target=20, **options):
        self.total, self.target = 0, target
        return Heard(heard=f"{target}?")

    def step(self, action, timeout_s=None, **options):
        if action.message == "9":
            raise ValueError("nine is forbidden")
        self.total += sum(map(int, action.message))
        return Heard(heard=f"={self.total}", reward=float(self.total == self.target), done=self.total >= self.target)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Sums, Say, Heard, max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
