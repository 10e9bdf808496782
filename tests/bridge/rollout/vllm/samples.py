"""Prompts that run together, and what an engine draws for them."""

from tests.bridge.rollout.vllm.policies import ends_of

PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(3, 50)), list(range(3, 52))]


def sampled(client):
    """Tokens and log-probabilities of prompts that run together, two of which share a prefix."""
    for number, prompt in enumerate(PROMPTS):
        params = client._sampling(max_tokens=24, seed=number, temperature=1.0)
        client.add_request(f"oracle-{number}", {"prompt_token_ids": prompt}, params)
    found = {}
    for output in ends_of(client):
        [made] = output.outputs
        logprobs = [row[token].logprob for token, row in zip(made.token_ids, made.logprobs, strict=True)]
        found[output.request_id] = (list(made.token_ids), logprobs)
    return found
