"""A tuner over the toy trainer, as a program that a test can kill. The words are JSON."""

import json
import signal
import sys
from pathlib import Path

from rl_bridge.common.terminal import SIGNALS, Stopped, StoppedAtOnce
from rl_tools.tune import study as module
from rl_tools.tune.goals import Pruning, parse_constraint, parse_goal
from rl_tools.tune.samplers import OptunaSampler
from rl_tools.tune.scheduler import Plan
from rl_tools.tune.space import Choice, Interval, Parameter, Space
from rl_tools.tune.study import Study, places, run_study

TOY = Path(__file__).with_name("toy.py")
module.POLL = 0.01


def study_of(folder, *, fails=("no", "no "), steps=4, pause=0.0, grace=5.0, devices=(), pruning=None, **plan):
    space = Space((Parameter("x", Interval(0.0, 1.0)), Parameter("fail", Choice(tuple(fails)))))
    made = Plan(
        (parse_goal("reward", maximize=True),),
        (parse_constraint("kl<=0.9"),),
        pruning=Pruning(**(pruning or {})),
        **({"trials": 4, "slots": 2} | plan),
    )

    def command(key, assignment, runs, resume):
        words = [part for name, value in assignment.items() for part in (name, str(value))]
        about = map(str, (TOY, runs / key.name, key.seed, steps, pause))
        run = [sys.executable, "-S", "-E", *about, *words]
        return [*run, "--resume"] if resume else run

    about = {
        "space": space.described(),
        "goals": [{"name": "reward", "maximize": True}],
        "constraints": ["kl<=0.9"],
        "steps": steps,
    }

    def sampler(journal):
        return OptunaSampler("random", space, 3, storage=journal.storage)

    at = places(made.slots, devices=devices)
    return Study(Path(folder), made, about, sampler, command, at, grace)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    resume = options.pop("resume", False)
    # As from a terminal: behind nohup, or in the background of a script, tests begin with ignored signals.
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        run_study(study_of(**options), resume=resume)
    except Stopped as stop:
        Path(options["folder"], "printed").write_text(str(stop))
        sys.exit(128 + stop.number)
    except StoppedAtOnce as stop:
        Path(options["folder"], "printed").write_text("; ".join(getattr(stop, "__notes__", [])))
        sys.exit(128 + stop.number)
