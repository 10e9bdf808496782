"""Every command that the documents name, and how `make documented` runs it in a fresh clone.

A long command has a short setting beside it, with the reason. Commands run in the root of the clone, $CLONE; $SCRATCH
is an empty folder outside it. The order is a newcomer's: what a command made is there for the later ones.
"""

from tests.repository.documents import Command
from tests.repository.quantised_commands import OF_VLLM, QUANTISED
from tests.repository.tools_commands import TOOLS

TINY = (
    "--sft.steps 2 --sft.rows-per-step 8 --policy.steps 2 --policy.prompts-per-step 4 --held-out 8 --checkpoint-every 1"
)
LOOP = "--warm-steps 2 --warm-rows 8 --steps 2 --prompts 4 --held-out 8 --checkpoint-every 1"
FEW = "--policy.sampling.max-new-tokens 5"
SHORT_RL = f"--policy.steps 2 --policy.prompts-per-step 4 --held-out 8 --checkpoint-every 1 {FEW}"
SFT = "--data problems.jsonl --model $CLONE/runs/quickstart/model --rows-per-step 4 --held-out 4"
GYM = "--held-out 4 --policy.steps 1 --policy.prompts-per-step 2 --policy.sampling.n 2"
GYM += " --policy.evaluate-every 1"
VLLM = ".venv-vllm/bin/rl-fn train policy --rollout.backend vllm"
UPDATE = ".venv-vllm/bin/python experiments/benchmarks/vllm_update.py"
VLLM_TESTS = {"test-vllm": "tests/bridge/rollout/vllm/test_vllm_engine.py", "test-newest": "tests/bridge/models"}
JAX = "--warm-start-steps 2 --steps 2 --prompts 4 --groups 2 --held-out 8 --evaluate-every 1 --checkpoint-every 1"
PIP = "$SCRATCH/pip/bin/pip install --quiet --constraint constraints.txt"
PINNED_HERE = ".venv/bin/pip install --quiet --constraint constraints.txt --editable"
PINNED = "without the pins pip takes CUDA's build of torch, gigabytes"

OWN = "(cd $SCRATCH && python $CLONE/tests/repository/own_data.py) && cd $SCRATCH && rl-fn"
MODEL = "--model $CLONE/runs/quickstart/model"
OWN_FILES = "the files are the reader's own; the model is the quickstart's"

AHEAD = (
    ".venv/bin/rl-fn train policy --asynchronous.max-staleness 1",
    ".venv/bin/rl-fn train policy --asynchronous.max-staleness 2 --asynchronous.partial "
    "--asynchronous.no-deterministic",
)
TO_PPO = (
    "train policy objective:ppo --name improved --model runs/demonstrated/model --data problems.jsonl "
    "--reward learned=model:runs/judged/model right=exact --reward-weights 1 0 --critic.model runs/judged/model "
    "--objective.kl.place reward --objective.kl.coef 1"
)
CONTROLLED = f"--name controlled {TINY}"
CONTROL = (
    ".venv/bin/rl-fn train policy objective:ppo --objective.kl.place reward --objective.kl.coef 0.05 "
    "--kl-control.kind pid --kl-control.target 0.05",
    ".venv/bin/rl-fn train policy --entropy-control.kind constraint --entropy-control.target 0.2 "
    "--entropy-control.lr 0.05",
)

COMMANDS = [
    Command("apt install python3-venv make", "python3 -m venv --help && make --version", "needs root; both are there"),
    Command(
        "pip install .",
        f"python3 -m venv $SCRATCH/pip && {PIP} . && cd $SCRATCH && pip/bin/python -c 'import rl_fn'",
        PINNED,
    ),
    Command('pip install ".[bridge]"', f'{PIP} ".[bridge]" && $SCRATCH/pip/bin/rl-fn --help', PINNED),
    Command(
        'pip install ".[kernels]"',
        f'{PIP} ".[kernels]" && cd $SCRATCH && pip/bin/python -c "import rl_kernels, triton"',
        PINNED,
    ),
    Command("make install"),
    Command("make quickstart", f'make quickstart OPTIONS="{LOOP}"', "minutes"),
    Command(
        ".venv/bin/python experiments/quickstart.py --resume",
        f".venv/bin/python experiments/quickstart.py --resume {LOOP}",
        "goes on with the short run",
    ),
    Command("python experiments/quickstart.py", f"python experiments/quickstart.py --name one {LOOP}", "minutes"),
    Command(
        "torchrun --nproc_per_node=2 experiments/quickstart.py",
        f"torchrun --standalone --nproc_per_node=2 experiments/quickstart.py --name two {LOOP}",
        "minutes",
    ),
    Command(".venv/bin/rl-fn train policy", f".venv/bin/rl-fn train policy {TINY}", "minutes"),
    Command(
        "rl-fn train policy --executor ray --workers 2",
        f'{PINNED_HERE} ".[ray]" && rl-fn train policy --executor ray --workers 2 --name three {TINY}',
        "minutes; Ray is an extra",
    ),
    Command("make install-vllm", group="vllm"),
    Command(VLLM, f"{VLLM} --rollout.vllm.kv-cache-gib 0.1 --name of-vllm {TINY}", "minutes", group="vllm"),
    *(Command(f"make {name}", f"make {name} TESTS={test}", "minutes", "vllm") for name, test in VLLM_TESTS.items()),
    Command(UPDATE, f"{UPDATE} --precisions fp32 --layers 2 --rows 8 --tokens 8 --output $SCRATCH/u", "slow", "vllm"),
    Command(".venv/bin/rl-fn train policy --help"),
    Command(".venv/bin/rl-fn train policy --help-all"),
    Command(
        ".venv/bin/rl-fn train runs/addition/run.toml --name again --policy.steps 3",
        f".venv/bin/rl-fn train runs/addition/run.toml --name again {TINY}",
        "minutes",
    ),
    Command(".venv/bin/rl-fn train runs/addition/run.toml --dry-run"),
    Command("rl-fn train base.toml large.toml --policy.steps 30", "rl-fn train --help", "names files of one's own"),
    Command("rl-fn new grpo my_loop.py", "rl-fn new grpo $SCRATCH/my_loop.py", "writes into the working folder"),
    Command(
        ".venv/bin/rl-fn train gspo --objective.clip-high 5e-4 --objective.kl.coef 0.01",
        f".venv/bin/rl-fn train gspo --objective.clip-high 5e-4 --objective.kl.coef 0.01 --name gspo {TINY}",
        "minutes",
    ),
    Command(".venv/bin/rl-fn train policy objective:gspo --help"),
    *(Command(words, f"{words} {CONTROLLED}", "minutes") for words in CONTROL),
    *(Command(words, f"{words} --name ahead {TINY}", "minutes") for words in AHEAD),
    Command(
        ".venv/bin/python experiments/asynchronous.py",
        f'{PINNED_HERE} ".[ray]" && .venv/bin/python experiments/asynchronous.py --seeds 1 --steps 3 --prompts 16 '
        "--evaluate-every 1 --warm-start-steps 2 --output $SCRATCH/compared",
        "an hour; the results are those of the repository; Ray is an extra",
    ),
    *(
        Command(
            f".venv/bin/python experiments/{name}.py --workers 4",
            f".venv/bin/python experiments/{name}.py --workers 4 --seeds 1 --steps 1 --output $SCRATCH/compared",
            "minutes; the results are those of the repository",
        )
        for name in ("policy_algorithms", "kl_controllers", "entropy_floor", "two_rewards")
    ),
    Command("rl-fn train policy", "rl-fn train policy --help", "the quickstart again"),
    *(Command(*row) for row in [*QUANTISED, *OF_VLLM, *TOOLS]),
    Command(
        ".venv/bin/rl-fn train grpo --data problems.jsonl --reward my_reward.py:score --model path/or/hub-id",
        "(cd $SCRATCH && python $CLONE/tests/repository/own_data.py) && cd $SCRATCH && rl-fn train grpo "
        f"--data problems.jsonl --reward my_reward.py:score --model $CLONE/runs/quickstart/model {SHORT_RL}",
        "the files are the reader's own; the model is the quickstart's",
    ),
    Command(
        ".venv/bin/rl-fn train sft --data conversations.jsonl --model path/or/hub-id --epochs 2",
        "(cd $SCRATCH && python $CLONE/tests/repository/own_data.py) && cd $SCRATCH && "
        f"rl-fn train sft {SFT} --epochs 0.1",
        "the files are the reader's own; the model is the quickstart's",
    ),
    Command(
        ".venv/bin/torchrun --nproc_per_node=2 -m rl_tools.cli train sft --data conversations.jsonl "
        "--model path/or/hub-id",
        f"cd $SCRATCH && torchrun --standalone --nproc_per_node=2 -m rl_tools.cli train sft {SFT} --name two --steps 2",
        "the files are the reader's own; the model is the quickstart's",
    ),
    Command(".venv/bin/rl-fn train sft --help"),
    Command(
        ".venv/bin/rl-fn train policy --data problems.jsonl --model path/or/hub-id "
        "--environment my_tools.py:Adder --max-turns 4",
        "(cd $SCRATCH && python $CLONE/tests/repository/own_data.py) && cd $SCRATCH && rl-fn train policy "
        f"--data problems.jsonl --model $CLONE/runs/quickstart/model {SHORT_RL} --name tools "
        "--environment my_tools.py:Adder --max-turns 4",
        "the files are the reader's own; the model is the quickstart's",
    ),
    Command(
        ".venv/bin/rl-fn train dpo --model path/or/hub-id --data preferences.jsonl --loss.beta 0.1",
        f"{OWN} train dpo {MODEL} --data preferences.jsonl --loss.beta 0.1 --held-out 20 --steps 2 --rows-per-step 8",
        OWN_FILES,
    ),
    Command(".venv/bin/rl-fn train preference loss:simpo --help"),
    Command(
        ".venv/bin/rl-fn train reward-model --model path/or/hub-id --data preferences.jsonl loss:bradley-terry "
        "--loss.center 0.01",
        f"{OWN} train reward-model {MODEL} --data preferences.jsonl loss:bradley-terry --loss.center 0.01 "
        "--held-out 20 --steps 2 --rows-per-step 8",
        OWN_FILES,
    ),
    Command(
        ".venv/bin/rl-fn train reward-model --model path/or/hub-id --data ranked.jsonl loss:plackett-luce",
        f"{OWN} train reward-model {MODEL} --data ranked.jsonl loss:plackett-luce --held-out 20 "
        "--steps 2 --rows-per-step 8",
        OWN_FILES,
    ),
    Command(
        ".venv/bin/rl-fn train sft --name demonstrated --model path/or/hub-id --data conversations.jsonl",
        f"{OWN} train sft --name demonstrated {SFT} --steps 2",
        OWN_FILES,
    ),
    Command(
        ".venv/bin/rl-fn train reward-model --name judged --model runs/demonstrated/model --data preferences.jsonl",
        "cd $SCRATCH && rl-fn train reward-model --name judged --model runs/demonstrated/model "
        "--data preferences.jsonl --held-out 20 --steps 2 --rows-per-step 8",
        OWN_FILES,
    ),
    Command(
        f".venv/bin/rl-fn {TO_PPO}",
        f"cd $SCRATCH && rl-fn {TO_PPO} --held-out 8 --policy.steps 2 --policy.prompts-per-step 4 {FEW}",
        OWN_FILES,
    ),
    Command(
        ".venv/bin/python experiments/sft_rm_ppo.py --workers 4",
        ".venv/bin/python experiments/sft_rm_ppo.py --short --seeds 1 --runs $SCRATCH/chain --output $SCRATCH/chained",
        "minutes; the results are those of the repository",
    ),
    Command(
        ".venv/bin/python experiments/reproducible.py --workers 4",
        ".venv/bin/python experiments/reproducible.py --seeds 1 --steps 2 --kills 1 --runs $SCRATCH/reproduced "
        "--output $SCRATCH/reproducible",
        "minutes; the results are those of the repository",
    ),
    Command(".venv/bin/rl-fn doctor"),
    Command(".venv/bin/rl-fn check examples/own_loss.py:loss"),
    Command(
        "rl-fn check FILE.py:name", ".venv/bin/rl-fn check examples/own_loss.py:loss", "the file is the reader's own"
    ),
    Command("rl-fn doctor"),
    Command("make test", "make test TESTS=tests/rl_fn/test_reward_model.py", "minutes; CI runs the whole suite"),
    Command("make test-long", "make test-long TESTS=tests/repository/test_wheel.py", "minutes; CI runs all of it"),
    Command("make test-all", "make test-all TESTS=tests/repository/test_wheel.py", "half an hour; CI runs all of it"),
    Command("make test-random", "make test-random TESTS=tests/rl_fn/test_reward_model.py", "as long as make test"),
    Command("make test-thorough", "make test-thorough TESTS=tests/rl_fn/test_reward_model.py", "an hour"),
    Command("make laws", "make laws LAWS=registry", "minutes, and a part of make test"),
    Command("make gate", "make gate STAGES=subject", "half an hour, and CI itself"),
    Command("make lint types"),
    Command("make format"),
    Command("make docs"),
    Command("make documented", "python -m tests.repository.documented --list", "this is it"),
    Command("make test-families", "make test TESTS=tests/bridge/families", "ten minutes; CI runs all of it"),
    Command("python -m tests.bridge.families.table", "python -m tests.bridge.families.table llama", "ten minutes"),
    Command("python -m tests.repository.papers"),
    Command("python -m tests.repository.families"),
    Command("python -m docs.scripts.objectives"),
    Command(
        "make benchmark-bridge",
        "python experiments/benchmarks/from_jax_ppo.py --rows 2 --length 16 --repeats 2 --shapes 2 "
        "--output $SCRATCH/ppo",
        "minutes",
    ),
    Command(
        "make benchmark-engines",
        "python experiments/benchmarks/ring_attention.py --tokens 64 --documents 1 --repeats 1 --scale 0.02 "
        "--output $SCRATCH/ring && python experiments/benchmarks/weight_sync.py --layers 1 --repeats 1 "
        "--output $SCRATCH/sync && python experiments/benchmarks/executor_overhead.py --kind local --repeats 10 "
        "--result $SCRATCH/overhead.json",
        "minutes, and Ray",
    ),
    Command(
        ".venv/bin/python experiments/benchmarks/truncation_cost.py",
        ".venv/bin/python experiments/benchmarks/truncation_cost.py --pairs 1 --tokens 1 --vocabularies 60 "
        "--output $SCRATCH/truncation",
        "minutes",
    ),
    Command(
        ".venv/bin/python experiments/benchmarks/loop_cost.py",
        ".venv/bin/python experiments/benchmarks/loop_cost.py --sizes 1M --steps 1 --output $SCRATCH/loop",
        "minutes",
    ),
    Command(
        ".venv/bin/python experiments/benchmarks/executor_failures.py",
        ".venv/bin/python experiments/benchmarks/executor_failures.py --help",
        "half an hour, and Ray",
    ),
    Command(
        "python experiments/calculator.py",
        "python experiments/calculator.py --seeds 0 --steps 1 --sft-steps 2 --runs $SCRATCH/runs "
        "--output $SCRATCH/calculator",
        "minutes",
    ),
    Command(
        "pip install openenv-core",
        "pip install --quiet --dry-run --no-deps openenv-core==0.3.0",
        "its dependencies hold back the pinned packages; make test-openenv installs it without",
    ),
    Command("python experiments/controllers.py"),
    Command(
        ".venv/bin/python experiments/preferences.py", ".venv/bin/python experiments/preferences.py --short", "minutes"
    ),
    Command("python experiments/estimators.py"),
    Command(
        "for s in 0 1 2; do .venv/bin/python experiments/grpo_jax.py --name seed$s --seed $s; done",
        f".venv/bin/python experiments/grpo_jax.py --name seed0 --seed 0 {JAX}",
        "four minutes a seed",
    ),
    Command(
        ".venv/bin/python experiments/results/grpo_jax/collect.py runs/seed0 runs/seed1 runs/seed2",
        ".venv/bin/python experiments/results/grpo_jax/collect.py runs/seed0",
        "one seed was run",
    ),
    Command(
        "for s in 0 1 2; do .venv/bin/python experiments/quickstart.py --name seed$s --seed $s; done",
        f".venv/bin/python experiments/quickstart.py --name seed1 --seed 1 {LOOP}",
        "four minutes a seed",
    ),
    *(
        Command(text, f"{text} --threads 1 --name {name} {TINY}", "minutes")
        for name, text in {
            "shards": ".venv/bin/torchrun --nproc_per_node=2 -m rl_tools.cli train policy",
            "tensors": ".venv/bin/torchrun --nproc_per_node=4 -m rl_tools.cli train policy --mesh.tensor 2",
        }.items()
    ),
    Command(
        ".venv/bin/rl-fn train policy --executor ray --workers 2 --mesh.sequence 2",
        "pip install --quiet --constraint constraints.txt ray && .venv/bin/rl-fn train policy "
        f"--executor ray --workers 2 --mesh.sequence 2 --threads 1 --name ray {TINY}",
        "minutes, and Ray is an extra",
    ),
    Command("python kernels/benchmarks/limits.py --tflops 790 --gbs 4300"),
    Command(
        "python kernels/benchmarks/linear_logprobs.py",
        "python kernels/benchmarks/linear_logprobs.py --groups 1 --hidden-size 16 --vocabulary 64 --turns 1 "
        "--name short --only 'ours, torch'",
        "minutes",
    ),
    Command("make mutation", "python -m tests.mutation --files rewards.py --sample 2 --out $SCRATCH/mutation", "hours"),
    Command(
        'make mutation MUTATION="--sample 600 --seed 7"',
        "python -m tests.mutation --sample 2 --seed 7 --out $SCRATCH/mutation2",
        "an hour",
    ),
    Command(
        'make mutation MUTATION="--files sampling.py"',
        "python -m tests.mutation --files value_losses.py --sample 2 --out $SCRATCH/mutation3",
        "minutes",
    ),
    Command("make install-smollm2"),
    Command(
        ".venv/bin/python experiments/smollm2_reasoning.py --threads 1",
        f".venv/bin/python experiments/smollm2_reasoning.py --threads 1 {GYM}",
        "half an hour",
    ),
    Command(
        "make test-extras", "make test-reasoning", "CI runs the whole; the other half comes with the other libraries"
    ),
    Command("bash experiments/peers/install.sh .venv-peers", group="peers"),
    Command(
        ".venv-peers/bin/python experiments/peers/table.py",
        ".venv-peers/bin/python experiments/peers/table.py --seeds 1",
        "minutes",
        "peers",
    ),
    Command(
        ".venv-peers/bin/python experiments/benchmarks/whole_step.py",
        ".venv-peers/bin/python experiments/benchmarks/whole_step.py --models tiny --turns 1 --steps 2 --prompts 2 "
        "--seconds 1 --updates 2 --output $SCRATCH/whole_step",
        "twelve minutes",
        "peers",
    ),
    Command(
        ".venv-peers/bin/python experiments/benchmarks/whole_step.py --vllm .venv-vllm/bin/python --models smollm2",
        "make install-vllm && .venv-peers/bin/python experiments/benchmarks/whole_step.py --vllm .venv-vllm/bin/python "
        "--models tiny --turns 1 --steps 2 --prompts 2 --seconds 1 --updates 2 --output $SCRATCH/whole_step_vllm",
        "a quarter of an hour",
        "peers",
    ),
    Command("make benchmark-step", "make --dry-run benchmark-step", "the command above", "peers"),
    Command(".venv-peers/bin/python -m pytest tests/peers -m peers", group="peers"),
    Command(".venv-peers/bin/rl-fn check trl", group="peers"),
    Command("make test-peers", "make --dry-run test-peers", "the tests above", "peers"),
    Command("rl-fn check trl", ".venv-peers/bin/rl-fn check trl", "where TRL is installed", "peers"),
    Command(".venv/bin/rl-fn check trl", "! .venv/bin/rl-fn check trl", "without TRL: an error that says so", "peers"),
    Command("rl-fn check", "rl-fn --help", "names a library"),
    Command("make peers", "make --dry-run peers", "the two commands above", "peers"),
]
