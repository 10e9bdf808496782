"""Many simulated runs, a seed each."""

import dataclasses

from tests.bridge.rollout.ahead.settings import setting_of
from tests.bridge.rollout.ahead.simulation import World


def explore(seeds):
    """The worlds of these seeds at their ends."""
    worlds = []
    for seed in seeds:
        setting = setting_of(seed)
        try:
            worlds.append(World(setting, seed).run())
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"World(setting_of({seed}), {seed}).run(): {error}; {setting}") from error
    return worlds


def same_each_time(seeds):
    """Deterministic runs whose delays differ, of which one is killed now and then, train on the same in each step."""
    compared = 0
    for seed in seeds:
        setting = dataclasses.replace(setting_of(seed), deaths=0, crashes=0)
        if setting.pace.deterministic:
            histories = [World(setting, f"{seed}/{other}").run().history for other in range(2)]
            killed = World(dataclasses.replace(setting, crashes=4), f"{seed}/killed").run().history
            assert histories[0] == histories[1] == killed, f"seed {seed}: {setting}"
            compared += 1
    return compared
