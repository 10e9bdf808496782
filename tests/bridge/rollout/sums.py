"""An environment that adds digits up, and conversations with it."""

from rl_bridge.environments import Step
from rl_bridge.environments.environment import Session
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout.conversations import Conversations, Limits, Opening
from tests.support.simulated_sampler import SimulatedSampler, SimulatedSteps

TOKENIZER = character_tokenizer("0123456789+-=?")
EOS = TOKENIZER.eos_token_id
DIGITS = range(2, 12)
LIMITS = Limits(max_turns=4, turn_tokens=6)


class Sum:
    """Answers with the sum of the digits so far; ends once it is above 40. The state is the sum modulo 3."""

    def reset(self, row):
        return Step(messages=[{"role": "user", "content": row["prompt"]}], state_id=0)

    def step(self, messages):
        total = sum(int(c) for m in messages if m["role"] == "assistant" for c in m["content"])
        answer = {"role": "tool", "content": f"={total}?"}
        return Step(messages=[answer], reward=float(total), done=total > 40, state_id=total % 3)


def openings(count, factory=Sum):
    rows = [{"prompt": f"{i}+{i}=", "_where": f"data.jsonl, row {i + 1}"} for i in range(count)]
    return [
        (Opening(request_id=(7, i), seed=100 + i, row=row, group=i), Session(factory)) for i, row in enumerate(rows)
    ]


def converse(count=12, *, factory=Sum, delay=lambda number: 0, limits=LIMITS, room=10**6, **sampled):
    """The trajectories, and the sampler and steps that made them."""
    steps = SimulatedSteps(delay)
    sampler = SimulatedSampler(DIGITS, EOS, room=room, clock=steps, **sampled)
    talks = Conversations(sampler, steps, TurnTemplate(TOKENIZER), limits, version=5)
    return talks.run(openings(count, factory)), sampler, steps
