"""OpenAI's protocol for generation: texts come back in order; what a trainer needs is refused where it is missing."""

import pytest

from rl_bridge.common.http import NoReply
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served.openai import OpenAIEndpoint
from rl_bridge.rollout.served.protocol import MalformedReply
from tests.bridge.rollout.served.recorded import recorded

SAMPLING = SamplingParams(max_new_tokens=5, n=2, seed=3)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def reply(path, payload, ids=True):
    """As vLLM replies; ``ids``: with the fields of return_token_ids."""
    said = payload["messages"][-1]["content"] if "messages" in payload else payload["prompt"]
    text = said[::-1] if isinstance(said, str) else "ids"
    tokens = [len(text), payload["seed"] % 50, 1]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    body = {"id": "x", "choices": [choice], "model": payload["model"]}
    wanted = payload.get("return_token_ids") and ids
    if path.endswith("/chat/completions"):
        choice["message"] = {"role": "assistant", "content": text}
        if wanted:
            body["prompt_token_ids"] = [7, 8]
            choice["logprobs"] = {"content": [{"token": "", "logprob": -0.5 * n} for n in range(3)]}
    else:
        choice["text"] = text
        if wanted:
            choice["prompt_token_ids"] = [7, 8]
            choice["logprobs"] = {"token_logprobs": [-0.5 * n for n in range(3)], "tokens": ["", "", ""]}
    if wanted:
        choice["token_ids"] = tokens
    return 200, body


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_texts_in_the_order_of_the_prompts(api):
    with recorded(reply) as (url, asked):
        endpoint = OpenAIEndpoint(url=f"{url}/v1/", model="m", api=api, extra=(("guided", "x"),), concurrency=3)
        found = endpoint.complete(["abc", "de"], SamplingParams(max_new_tokens=5, n=2, top_k=4, temperature=0.5))
        assert [[text.content for text in row] for row in found] == [["cba", "cba"], ["ed", "ed"]]
        assert found[0][0].messages[-1] == {"role": "assistant", "content": "cba"} and found[0][0].tokens is None
        assert {path for path, _ in asked} == {f"/v1/{'chat/' if api == 'chat' else ''}completions"}
        _, payload = asked[0]
        assert (payload["max_tokens"], payload["temperature"], payload["top_k"], payload["guided"]) == (5, 0.5, 4, "x")
        assert len({payload["seed"] for _, payload in asked}) == 4 and "return_token_ids" not in payload
        assert endpoint.complete([], SAMPLING) == []


@pytest.mark.parametrize("api, prompt", [("chat", "ab"), ("completions", "ab"), ("completions", [7, 8])])
def test_token_ids_make_trajectories(api, prompt):
    with recorded(reply) as (url, _):
        endpoint = OpenAIEndpoint(url=f"{url}/v1", model="m", api=api, token_ids=True)
        (rows,) = endpoint.trajectories([prompt], SAMPLING)
    for number, t in enumerate(rows):
        assert t.prompt_tokens == (7, 8) and len(t.sampled_tokens) == 3 and t.sampled_logprobs == (0.0, -0.5, -1.0)
        assert t.request_id == (3, 0, number) and t.spans[0].request_id == t.request_id
    assert collate(rows, 0).mask.sum() == 6


def test_what_a_trainer_needs_is_refused_where_it_is_missing():
    with recorded(lambda path, payload: reply(path, payload, ids=False)) as (url, _):
        with pytest.raises(ValueError, match=r"returns text, and text encoded again may be other tokens"):
            OpenAIEndpoint(url=url, model="m").trajectories(["ab"], SAMPLING)
        with pytest.raises(MalformedReply, match=r"/chat/completions \(request 3-0-0\) returned no token ids"):
            OpenAIEndpoint(url=url, model="m", token_ids=True, concurrency=1).trajectories(["ab"], SAMPLING)
        with pytest.raises(ValueError, match=r"no log-probabilities of the distribution that was sampled from"):
            truncated = SamplingParams(max_new_tokens=5, top_p=0.9)
            OpenAIEndpoint(url=url, model="m", token_ids=True).trajectories(["ab"], truncated)
        with pytest.raises(ValueError, match="chat completions take text or messages, not token ids"):
            OpenAIEndpoint(url=url, model="m").complete([[1, 2]], SAMPLING)
        with pytest.raises(ValueError, match="text completions take text or token ids, not messages"):
            chat = [{"role": "user", "content": "a"}]
            OpenAIEndpoint(url=url, model="m", api="completions").complete([chat], SAMPLING)


def test_log_probabilities_must_be_of_every_token():
    def lacking(path, payload):
        status, body = reply(path, payload)
        body["choices"][0]["logprobs"]["content"].pop()
        return status, body

    with recorded(lacking) as (url, _), pytest.raises(MalformedReply, match="2 log-probabilities for 3 tokens"):
        OpenAIEndpoint(url=url, model="m", token_ids=True).trajectories(["ab"], SAMPLING)


def test_a_failure_names_the_endpoint_and_the_request_and_a_lost_reply_is_asked_for_again():
    tries = []

    def flaky(path, payload):
        tries.append(payload["seed"])
        return (503, {"error": "busy"}) if tries.count(payload["seed"]) < 2 else reply(path, payload)

    with recorded(flaky) as (url, asked):
        endpoint = OpenAIEndpoint(url=url, model="m", retries=1)
        assert [text.content for text in endpoint.complete(["ab"], SAMPLING)[0]] == ["ba", "ba"] and len(asked) == 4
        with pytest.raises(NoReply, match=r"/chat/completions \(request 3-0-\d\) in 1 try; .*status 503"):
            tries.clear()
            OpenAIEndpoint(url=url, model="m", retries=0).complete(["cd"], SAMPLING)
