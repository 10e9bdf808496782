"""The other commands: report, plan, export, tune, check, quantize; and words that are no command or option."""

from pathlib import Path

from tests.bridge.bad_inputs.case import POLICY, SFT, Case, changed
from tests.bridge.bad_inputs.data import text

KIND = "commands"
RUN = "done/first"


def damaged(file: str, content: str | bytes):
    return text(f"{RUN}/{file}", content)


def without(file: str):
    return lambda folder: (folder / RUN / file).unlink()


def begun(file: str):
    """One more line, whose writer was killed."""

    def damage(folder: Path) -> None:
        with (folder / RUN / file).open("a") as lines:
            lines.write('{"step"')

    return damage


PLAN = "plan sft --model tinyq --prompt-tokens 9 --completion-tokens 3 --no-knobs"
TUNE = f"tune {SFT.removeprefix('train ')} --trials 1 --space.optimizer.learning-rate log:1e-4..1e-3"
TUNE = TUNE.replace("--name first", "--name study")
# Name, command, damage, what has to be said.
CASES = [
    ("no command", "trian sft", None, ("trian", "train")),
    ("no trainer", "train stf", None, ("stf", "sft")),
    ("an unknown option", f"{SFT} --step 3", None, ("--step", "--steps")),
    ("an unknown option with =", f"{SFT} --dta=sums.jsonl", None, ("--dta", "--data")),
    ("a word too many", f"{SFT} extra", None, ("extra",)),
    ("a value for a switch", f"{SFT} --packing True", None, ("True",)),
    ("a value that is missing", f"{SFT} --max-length", None, ("--max-length",)),
    ("another trainer's option", f"{SFT} --policy.steps 3", None, ("--policy.steps",)),
    ("an unknown algorithm", f"{POLICY} objective:gspoo", None, ("objective:gspoo", "objective:gspo")),
    ("an unknown loss", f"{POLICY.replace('policy', 'preference', 1)} loss:dpoo", None, ("loss:dpoo",)),
    ("an algorithm's option without it", f"{POLICY} --objective.tau 1", None, ("--objective.tau",)),
    ("no choice of dtype", f"{SFT} --dtype float15", None, ("--dtype", "float15", "bfloat16")),
    ("no choice of decay", f"{SFT} --optimizer.decay step", None, ("--optimizer.decay", "step", "cosine")),
    ("no choice of activations", f"{SFT} --activations some", None, ("--activations", "some", "selective")),
    ("no choice of offload", f"{SFT} --offload all", None, ("--offload", "all", "phases")),
    ("no choice of control", f"{POLICY} --kl-control.kind bang", None, ("--kl-control.kind", "bang", "pid")),
    ("no tracker", f"{SFT} --trackers notes", None, ("trackers", "notes", "tensorboard")),
    ("a tracker's project without one", f"{SFT} --tracker-project p", None, ("tracker-project", "no effect")),
    ("a name that leaves the folder", changed(SFT, "--name ../first"), None, ("name", "../first")),
    ("an empty name", changed(SFT, "--name ''"), None, ("name", "folder")),
    ("a hidden name", changed(SFT, "--name .first"), None, ("name", ".first")),
    ("a name with a blank at its end", changed(SFT, "--name 'first '"), None, ("name", "first")),
    ("a long name", changed(SFT, f"--name {'n' * 300}"), None, ("name", "folder")),
    ("a file as the output", changed(SFT, "--output sums.jsonl"), None, ("sums.jsonl",)),
    ("a file within the output", changed(SFT, "--output sums.jsonl/runs"), None, ("sums.jsonl",)),
    ("nothing to resume", f"{SFT} --resume", None, ("runs/first", "resume")),
    ("nothing to resume anyway", f"{SFT} --resume-anyway", None, ("runs/first", "resume")),
    ("resumed with another option", changed(SFT, "--output done", "--rows-per-step 3") + " --resume", None, ("rows-per-step", "2", "3")),
    ("resumed with other data", changed(SFT, "--output done") + " --resume", lambda f: (f / "sums.jsonl").open("a").write('{"prompt": "1", "response": "2"}\n'), ("data", "another one")),
    ("resumed without its config", changed(SFT, "--output done") + " --resume", damaged("metrics.jsonl", "{"), ("metrics.jsonl",)),
    ("two algorithms", f"{POLICY} objective:grpo objective:gspo", None, ("objective:gspo",)),
    ("more workers than the mesh", f"{SFT} --mesh.tensor 2", None, ("tensor|mesh",)),
    ("report of nothing", "report", None, ("RUN|run",)),
    ("report of an absent folder", "report gone", None, ("gone",)),
    ("report of a file", "report sums.jsonl", None, ("sums.jsonl",)),
    ("report of an empty folder", "report void", lambda f: (f / "void").mkdir(), ("void",)),
    ("report of a model", "report tinyq", None, ("tinyq",)),
    ("report of cut metrics", f"report {RUN}", begun("metrics.jsonl"), None),
    ("report of metrics that are none", f"report {RUN}", damaged("metrics.jsonl", "hello\n[1]\n"), ("metrics.jsonl",)),
    ("report into a folder", f"report {RUN} --output tinyq", None, ("tinyq",)),
    ("report watched for ever less", f"report {RUN} --watch 0", None, ("--watch", "0")),
    ("report watched NaN", f"report {RUN} --watch nan", None, ("--watch", "nan")),
    ("report with an unknown option", f"report {RUN} --tilte x", None, ("--tilte",)),
    ("right: report", f"report {RUN}", None, None),
    ("plan of nothing", "plan", None, ("config",)),
    ("plan of an absent folder", "plan gone", None, ("gone",)),
    ("plan of no trainer", "plan stf", None, ("stf",)),
    ("plan without lengths", "plan sft --model tinyq --no-knobs", None, ("--prompt-tokens",)),
    ("plan of an absent model", changed(PLAN, "--model gone"), None, ("gone",)),
    ("plan with a size that is none", f"{PLAN} --fits many", None, ("--fits|size", "many")),
    ("plan with no size", f"{PLAN} --fits 0", None, ("--fits|size|bytes", "0")),
    ("plan of less than no tokens", changed(PLAN, "--prompt-tokens -5"), None, ("--prompt-tokens|prompt_tokens|prompt tokens", "-5")),
    ("plan of less than no completion", changed(PLAN, "--completion-tokens -5"), None, ("--completion-tokens|completion_tokens|completion tokens", "-5")),
    ("plan of no workers", f"{PLAN} --workers 0", None, ("workers", "0")),
    ("plan of a run with options", f"plan {RUN} --seed 3", None, ("--seed", "3")),
    ("plan of a broken config", f"plan {RUN}", damaged("config.json", "{"), ("config.json",)),
    ("plan of a config of a list", f"plan {RUN}", damaged("config.json", "[]"), ("config.json",)),
    ("plan of another config", f"plan {RUN}", damaged("config.json", "{}"), ("config.json",)),
    ("plan with an unknown option", f"{PLAN} --sft.step 3", None, ("--sft.step",)),
    ("export of nothing", "export", None, ("RUN|required|PATH|TUPLE",)),
    ("export of an absent folder", "export gone --to tensorboard --output out", None, ("gone",)),
    ("export of a file", "export sums.jsonl --to tensorboard --output out", None, ("sums.jsonl",)),
    ("export to nobody", f"export {RUN} --to notes --output out", None, ("notes", "tensorboard")),
    ("export into a file", f"export {RUN} --to tensorboard --output sums.jsonl", None, ("sums.jsonl",)),
    ("export of metrics that are none", f"export {RUN} --to tensorboard --output out", damaged("metrics.jsonl", "hello\n"), ("metrics.jsonl",)),
    ("tune without a space", TUNE.replace("--space.optimizer.learning-rate log:1e-4..1e-3", ""), None, ("--space|space",)),
    ("tune of no trainer", TUNE.replace("tune sft", "tune stf"), None, ("stf", "sft")),
    ("tune of an unknown option", TUNE.replace("learning-rate", "lerning-rate"), None, ("optimizer.lerning-rate", "optimizer.learning-rate")),
    ("tune of no domain", TUNE.replace("log:1e-4..1e-3", "log:many"), None, ("optimizer.learning-rate", "log:many")),
    ("tune of a domain backwards", TUNE.replace("log:1e-4..1e-3", "1e-3..1e-4"), None, ("optimizer.learning-rate",)),
    ("tune of a logarithm of zero", TUNE.replace("log:1e-4..1e-3", "log:0..1"), None, ("optimizer.learning-rate",)),
    ("tune of NaN", TUNE.replace("log:1e-4..1e-3", "nan,1"), None, ("learning-rate", "nan")),
    ("tune with no trials", changed(TUNE, "--trials 0"), None, ("trials", "0")),
    ("tune with no seeds", f"{TUNE} --seeds 0", None, ("seeds", "0")),
    ("tune with no processes", f"{TUNE} --parallel 0", None, ("parallel", "0")),
    ("tune with a fixed option", f"{TUNE} --optimizer.learning-rate 1", None, ("--optimizer.learning-rate", "once|fixed")),
    ("tune with an unknown sampler", f"{TUNE} --sampler luck", None, ("--sampler", "luck", "random")),
    ("tune with a constraint that is none", f"{TUNE} --constraint kl=3", None, ("constraint", "kl=3")),
    ("tune with the run's seed", f"{TUNE} --seed 3", None, ("--seed",)),
    ("tune with a bad option of the trainer", f"{TUNE} --sft.step 3", None, ("--sft.step",)),
    ("tune by an absent function", TUNE.replace("--space.optimizer.learning-rate log:1e-4..1e-3", "--space gone.py:f"), None, ("gone",)),
    ("tune's report of an absent study", "tune report gone", None, ("gone",)),
    ("tune's report of a run", f"tune report {RUN}", None, (RUN,)),
    ("tune to resume nothing", f"{TUNE} --resume", None, ("study",)),
    ("check of nothing", "check", None, ("library|required|trl",)),
    ("check of an unknown library", "check rlx", None, ("rlx", "trl")),
    ("check of two", "check trl verl", None, ("verl",)),
    ("doctor of something", "doctor me", None, ("me",)),
    ("quantize of nothing", "quantize", None, ("profile",)),
    ("quantize of something else", "quantize weights", None, ("weights", "profile")),
    ("quantize's profile without a model", "quantize profile -q tinyq -o out.json", None, ("--model",)),
    ("quantize's profile of an absent folder", "quantize profile -m tinyq -q gone -o out.json", None, ("gone",)),
    ("quantize's profile of what is not quantised", "quantize profile -m tinyq -q tinyq -o out.json", None, ("tinyq",)),
    ("quantize's verify of an absent model", "quantize verify -m gone --engine none", None, ("gone",)),
    ("quantize's verify of absent prompts", "quantize verify -m tinyq --prompts gone.txt", None, ("gone.txt",)),
    ("quantize's setup with no pair", "quantize setup -o out.yaml nonsense", None, ("nonsense", "NAME=VALUE|=")),
]  # fmt: skip


def cases() -> list[Case]:
    return [
        Case(kind=KIND, name=name, command=command, says=says or (), works=says is None, damage=damage)
        for name, command, damage, says in CASES
    ]
