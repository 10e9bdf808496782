"""Every option that takes a number x every wrong number, every choice x no choice, and options that contradict."""

import typing

from tests.bridge.bad_inputs.case import TRAINERS, Case, changed
from tests.bridge.bad_inputs.forks import in_a_child

KIND = "options"
WHOLE = ("-1", "0", "99999999999999999999", "many")
FRACTION = ("-1", "0", "nan", "inf")
SKIPPED = ("rollout.vllm", "tracker", "executor", "workers", "rollout.backend", "sft.optimizer")


PID = "--kl-control.kind pid --kl-control.target 0.1 --kl-control.kp 0.1 --kl-control.ki 0.1 --kl-control.kd 0.1"
LINEAR = "--kl-control.kind linear --kl-control.target 0.1 --kl-control.horizon 100"
EXPONENTIAL = "--kl-control.kind exponential --kl-control.target 0.1 --kl-control.up 1.5 --kl-control.down 0.5 --kl-control.low 0.1 --kl-control.high 0.3 --objective.kl.coef 0.1"
SCHEDULED = "-control.kind scheduled {0}.schedule linear {0}.end 0.1 {0}.steps 3"
CONSTRAINT = "-control.kind constraint {0}.target 0.1 {0}.lr 0.1"
ADAPTIVE = "--entropy-control.kind adaptive --entropy-control.target 0.1 --entropy-control.step 0.01"
ASYNCHRONOUS = "--asynchronous.max-staleness 1"
NEEDS = {
    "lora": "--lora.rank 2",
    "critic": "objective:ppo",
    "max-turns": "--environment played.py:Game",
    "max-trajectory-tokens": "--environment played.py:Game",
    "environment": "--environment played.py:Game",
    "sft.optimizer": "--sft.steps 1",
    "policy.pass-samples": "--policy.pass-at 1 2",
    "policy.least-effective-share": "--policy.recompute-old-logprobs",
    "policy.sampling-rounds": "objective:dapo --objective.dynamic-sampling True",
    "policy.critic-warmup": "objective:ppo --policy.steps 3",
    "policy.scalar": "--policy.scalar.method tchebycheff --policy.scalar.ideal 1",
    "asynchronous": ASYNCHRONOUS,
    "asynchronous.round-tokens": f"{ASYNCHRONOUS} --asynchronous.deterministic",
    "kl-control": PID,
    "kl-control.horizon": LINEAR,
    "kl-control.clip": LINEAR,
    "kl-control.low": EXPONENTIAL,
    "kl-control.up": EXPONENTIAL,
    "kl-control.down": EXPONENTIAL,
    "entropy-control": ADAPTIVE,
}
"""An option, or the part that it stands in, and what has to be given beside it."""
_COEFFICIENT = {"--kl": " --objective.kl.coef 0.1", "--entropy": " --objective.entropy.coef 0.1"}
for _term in ("--kl", "--entropy"):
    NEEDS |= {
        f"{_term[2:]}-control.{name}": _term + SCHEDULED.format(f"{_term}-control") + _COEFFICIENT[_term]
        for name in ("steps", "end")
    }
    NEEDS |= {
        f"{_term[2:]}-control.{name}": _term + CONSTRAINT.format(f"{_term}-control") for name in ("lr", "penalty")
    }
NEEDS["kl-control.warmup"] = (
    "--kl" + SCHEDULED.format("--kl-control").replace("linear", "warmup_cosine") + _COEFFICIENT["--kl"]
)
NEEDS["entropy-control.warmup"] = NEEDS["kl-control.warmup"].replace("kl", "entropy")
MAY_BE_ZERO = """
asynchronous.max-staleness critic.optimizer.beta1 critic.optimizer.beta2 critic.optimizer.final
critic.optimizer.initial critic.optimizer.warmup critic.optimizer.weight-decay entropy-control.end entropy-control.high
entropy-control.low entropy-control.penalty environment-processes kl-control.end kl-control.kd kl-control.ki kl-control.kp
kl-control.penalty lora.rank loss.alpha loss.center loss.chosen-win-rate loss.desirable-weight loss.gamma
loss.label-smoothing loss.lam loss.margin loss.rejected-win-rate loss.undesirable-weight objective.baseline
objective.clip-high objective.clip-low objective.coef objective.cov-low objective.critic-lam objective.entropy.coef
objective.fraction objective.gamma objective.k-neg objective.k-pos objective.kl-coef objective.kl.coef objective.lam
objective.lambda-neg objective.lambda-pos objective.positive-coef objective.weight optimizer.beta1 optimizer.beta2
optimizer.final optimizer.initial optimizer.warmup optimizer.weight-decay policy.correct-reward policy.critic-warmup
policy.least-effective-share policy.overlong-buffer policy.scalar.rho loss.shift-momentum reward-weights samples-every seed
system-every
""".split()
MAY_BE_NEGATIVE = """
loss.gamma loss.margin objective.baseline objective.cov-low objective.weight policy.correct-reward reward-weights
seed
""".split()
"""Looked at one by one: with these values an option does what it says, so they are no bad input."""
GAME = """\
from rl_bridge.environments import Step


class Game:
    def reset(self, row):
        self.answer = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        return Step(reward=float(len(messages[-1]["content"])), done=True)
"""


def cases() -> list[Case]:
    return [*generated(), *by_hand()]


def generated() -> list[Case]:
    found = []
    # The options of algorithms start JAX, and a process with JAX cannot be forked: they are listed in one that ends.
    for name, trainer, recipe, values in in_a_child(listed):
        beside = needed(name)
        command = with_options(f"{TRAINERS[trainer]} {'' if ':' in beside else recipe}", beside)
        for value in values:
            if value in ("0", "-1") and name in (MAY_BE_ZERO if value == "0" else MAY_BE_NEGATIVE):
                continue
            right = (name, value) == ("objective.eps", "0")  # equal rewards are divided by it
            found.append(
                Case(
                    kind=KIND,
                    name=f"train {trainer} {recipe} --{name} {value}".replace("  ", " "),
                    command=changed(command, f"--{name} {value}"),
                    says=() if right else words_for(name, recipe),
                    works=right,
                    damage=write_game if "played.py" in beside else None,
                )
            )
    return found


def listed() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(Option, a trainer that has it, its recipe, wrong values) of all options that take numbers, each once."""
    from rl_bridge.pipelines.objective_options import ALGORITHMS
    from rl_tools.trainer_options import TRAINERS as TABLE
    from rl_tools.trainer_options import load, options_of
    from rl_train.compared import LOSSES, REWARD_MODEL_LOSSES

    made = {k.replace("_", "-"): v for t in (ALGORITHMS, LOSSES, REWARD_MODEL_LOSSES) for k, v in t.items()}
    having: dict = {}
    for trainer, entry in TABLE.items():
        default = load(entry.default)
        known = options_of(default if isinstance(default, type) else default())
        for name, kind in known.kinds.items():
            having.setdefault(name, []).append((trainer, "", kind))
        for holder, recipes in known.recipes.items():
            for recipe in sorted(recipes):
                for name, kind in options_of(made[recipe]()).kinds.items():
                    having.setdefault(f"{holder}.{name}", []).append((trainer, f"{holder}:{recipe}", kind))
    found = []
    for number, name in enumerate(sorted(having)):
        trainer, recipe, kind = having[name][number % len(having[name])]
        if not name.startswith(SKIPPED) and (values := values_of(kind)):
            found.append((name, trainer, recipe, values))
    return found


def words_for(name: str, prefix: str) -> tuple[str, ...]:
    """The option's own name; of a name with one letter its recipe besides."""
    last = name.rpartition(".")[2]
    return (last,) if len(last) > 1 else (last, f"{last} must|{name}")


def needed(name: str) -> str:
    """What has to stand beside an option: of the longest of its parts that is listed."""
    parts = name.split(".")
    beginnings = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((NEEDS[beginning] for beginning in beginnings if beginning in NEEDS), "")


def with_options(command: str, words: str) -> str:
    """The words, each option with its values, in place of the command's own."""
    given = words.split(" --")
    plain = [] if words.startswith("--") else [given.pop(0)]
    options = [f"--{word.removeprefix('--')}" for word in given if word]
    return changed(f"{command} {' '.join(plain)}", *options)


def write_game(folder) -> None:
    (folder / "played.py").write_text(GAME)


def values_of(kind):
    parts = {kind, *typing.get_args(kind)}
    if float in parts:
        return FRACTION
    return WHOLE if int in parts and bool not in parts else ()


def by_hand():
    return []
