"""Words of a run of the policy's trainer that takes seconds."""

TINY = {"sft.steps": 1, "sft.rows-per-step": 4, "policy.steps": 1, "policy.prompts-per-step": 2, "held-out": 4}
TINY |= {"policy.responses-per-prompt": 2, "policy.evaluate-every": 1, "checkpoint-every": 1}
SHORT = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
