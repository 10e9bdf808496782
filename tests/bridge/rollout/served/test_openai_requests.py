"""What an endpoint of OpenAI's protocol is asked for, over which connection, and what its replies become."""

import pytest

from rl_bridge.data.messages import Chat
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served import openai
from rl_bridge.rollout.served.openai import EXTENSIONS, OpenAIEndpoint
from rl_bridge.rollout.served.protocol import MalformedReply

SAMPLING = SamplingParams(max_new_tokens=5, n=2, seed=3)
ASK = [{"role": "user", "content": "a"}]
TOOLS = ({"type": "function", "function": {"name": "add"}},)


def choice_of(payload, **fields):
    """A choice as vLLM replies, with ids that tell its request from others."""
    ids = [payload["seed"] % 50, 1]
    choice = {"message": {"content": "x"}, "text": "x", "finish_reason": "stop", "token_ids": ids}
    of_chat = "messages" in payload
    content = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]} if of_chat else {"token_logprobs": [-1.0, -2.0]}
    return choice | {"logprobs": content, "prompt_token_ids": [7, 8]} | fields


class Endpoint:
    """Stands for the connection; keeps how it was opened and what was posted."""

    def __init__(self):
        self.opened, self.posted, self.fields, self.choices = [], [], {}, None

    def __call__(self, **connection):
        self.opened.append(connection)
        return self

    def post(self, payload, *, path, what):
        self.posted.append(payload)
        choices = [choice_of(payload, **self.fields)] if self.choices is None else self.choices
        return {"choices": choices}


@pytest.fixture
def server(monkeypatch):
    server = Endpoint()
    monkeypatch.setattr(openai, "Server", server)
    return server


def endpoint(**options):
    return OpenAIEndpoint(**{"url": "http://h/v1/", "model": "m", "concurrency": 1} | options)


def test_a_connection_has_the_endpoint_s_own_headers_and_limits(server):
    limits = {"headers": (("Authorization", "Bearer x"),), "timeout": 7.0, "retries": 2}
    endpoint(**limits).complete(["a"], SAMPLING)
    assert server.opened == [{"url": "http://h/v1", **limits}] * 2


def test_a_seed_is_one_that_every_server_takes(server):
    """Seeds have 64 bits here, with a sign; a server of OpenAI's protocol may take 31 of them alone."""
    endpoint().complete(["a"] * 20, SAMPLING)
    seeds = [payload["seed"] for payload in server.posted]
    assert all(0 <= seed < 2**31 for seed in seeds) and max(seeds) > 2**30 and len({*seeds}) == 40


@pytest.mark.parametrize("protocol_only", [False, True])
def test_every_parameter_of_sampling_is_sent_that_the_server_knows(server, protocol_only):
    endpoint(protocol_only=protocol_only).complete(["a"], SAMPLING)
    neutral = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    more = {} if protocol_only else {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    (payload, _), names = server.posted, {*neutral, *EXTENSIONS}
    assert {name: value for name, value in payload.items() if name in names} == neutral | more
    assert "stop" not in payload and "tools" not in payload and "return_token_ids" not in payload


def test_texts_that_stop_a_completion_are_sent_in_their_order(server):
    endpoint().complete(["a"], SamplingParams(max_new_tokens=5, stop=("b", "a")))
    assert server.posted[0]["stop"] == ["b", "a"]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"top_k": 3, "top_p": 0.9}, "may cut by top_k and top_p in another order"),
        ({"top_p": 0.9, "min_p": 0.1}, "may cut by top_p and min_p in another order"),
    ],
)
def test_two_truncations_whose_order_is_not_known_are_refused_before_anything_is_sent(server, cut, message):
    with pytest.raises(ValueError, match=message):
        endpoint().complete(["a"], SamplingParams(max_new_tokens=5, **cut))
    assert not server.opened


def test_a_truncation_that_is_not_in_the_protocol_is_refused_where_nothing_else_is_sent(server):
    with pytest.raises(ValueError, match="OpenAI's protocol has no min_p, and protocol_only"):
        endpoint(protocol_only=True).complete(["a"], SamplingParams(max_new_tokens=5, min_p=0.1))
    with pytest.raises(ValueError, match="token_ids is an extension of vLLM"):
        endpoint(protocol_only=True, token_ids=True)
    endpoint(protocol_only=True).complete(["a"], SamplingParams(max_new_tokens=5, top_p=0.9))
    assert [payload["top_p"] for payload in server.posted] == [0.9]


def test_tools_and_arguments_of_the_template_are_the_chat_s_and_its_own_come_before_those_of_all(server):
    of_all = (("chat_template_kwargs", {"thinking": True, "depth": 1}),)
    chat = Chat(ASK, TOOLS, {"thinking": False})
    endpoint(extra=of_all).complete([chat, ASK], SamplingParams(max_new_tokens=5))
    first, second = server.posted
    assert first["tools"] == list(TOOLS) and "tools" not in second
    assert first["chat_template_kwargs"] == {"thinking": False, "depth": 1}
    assert second["chat_template_kwargs"] == {"thinking": True, "depth": 1} == of_all[0][1]


@pytest.mark.parametrize("chat", [Chat("a", TOOLS, {}), Chat("a", (), {"thinking": False})], ids=["tools", "arguments"])
def test_a_chat_s_tools_and_arguments_need_the_chat_api_and_arguments_an_extension(server, chat):
    with pytest.raises(ValueError, match="text completions have no chat template"):
        endpoint(api="completions").complete([chat], SAMPLING)
    assert not server.posted
    only = endpoint(protocol_only=True)
    if chat.arguments:
        with pytest.raises(ValueError, match="OpenAI's protocol has no chat_template_kwargs"):
            only.complete([chat], SAMPLING)
        assert not server.posted
    else:
        only.complete([chat], SAMPLING)
        assert server.posted[0]["tools"] == list(TOOLS)


ENDS = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort", "content_filter": "error"}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_completion_is_the_server_s(server, end):
    server.fields = {"finish_reason": end}
    assert [text.finish_reason for text in endpoint().complete(["a"], SAMPLING)[0]] == [ENDS[end]] * 2


def test_calls_that_a_server_took_out_of_the_text_are_in_the_message(server):
    calls = [{"function": {"name": "add"}}]
    server.fields = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    text = endpoint().complete([ASK], SAMPLING)[0][0]
    assert text.content == "" and text.messages == (*ASK, {"role": "assistant", "content": "", "tool_calls": calls})
    server.fields = {"message": {"content": "x", "tool_calls": []}}
    assert "tool_calls" not in endpoint().complete([ASK], SAMPLING)[0][0].messages[-1]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_trajectory_has_the_ids_of_its_own_request_and_the_place_of_its_prompt(server, api):
    rows = endpoint(api=api, token_ids=True).trajectories(["a", "b", "c"], SAMPLING)
    seeds = iter(payload["seed"] % 50 for payload in server.posted)
    assert all(payload["return_token_ids"] is True for payload in server.posted)
    # In completions it is a count of other tokens, and in a chat a switch.
    assert {str(payload["logprobs"]) for payload in server.posted} == {"True" if api == "chat" else "0"}
    for place, row in enumerate(rows):
        assert [(t.group, t.request_id) for t in row] == [(place, (3, place, number)) for number in range(2)]
        assert [t.sampled_tokens for t in row] == [(next(seeds), 1) for _ in row]
        assert {(t.prompt_tokens, t.sampled_logprobs, t.finish_reason) for t in row} == {((7, 8), (-1.0, -2.0), "stop")}


@pytest.mark.parametrize(
    "fields",
    [{"token_ids": []}, {"token_ids": None}, {"prompt_token_ids": None}],
    ids=["no ids", "None", "no prompt"],
)
def test_a_reply_without_the_ids_of_both_parts_is_refused(server, fields):
    server.fields = fields
    with pytest.raises(MalformedReply, match="returned no token ids"):
        endpoint(token_ids=True).trajectories(["a"], SAMPLING)


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, {"content": [{"logprob": -1.0}]}, {"content": [{"logprob": None}] * 2}],
    ids=["none", "empty", "no content", "too few", "None of a token"],
)
def test_a_reply_without_a_log_probability_of_every_token_is_refused(server, logprobs):
    server.fields = {"logprobs": logprobs}
    with pytest.raises(MalformedReply, match=r"returned \d log-probabilities for 2 tokens"):
        endpoint(token_ids=True).trajectories(["a"], SAMPLING)


def test_a_reply_without_a_choice_is_refused_by_its_request(server):
    server.choices = []
    with pytest.raises(MalformedReply, match=r"completions \(request 3-0-0\) replied without a choice"):
        endpoint().complete(["a"], SAMPLING)


@pytest.mark.parametrize(
    ("options", "sampling", "message"),
    [
        ({"extra": (("min_tokens", 3), ("user", "me"))}, {}, "extra has min_tokens, which may change"),
        ({}, {"temperature": 0.5}, "at temperature 1 without truncation"),
        ({}, {"top_k": 3}, "at temperature 1 without truncation"),
        ({}, {"stop": ("a",)}, "a server that cuts a completion at a text"),
    ],
)
def test_trajectories_of_another_distribution_or_of_cut_text_are_refused(server, options, sampling, message):
    with pytest.raises(ValueError, match=message):
        endpoint(token_ids=True, **options).trajectories(["a"], SamplingParams(max_new_tokens=5, **sampling))
    assert not server.opened
