"""A judge and a reward model behind a real server, which misbehaves."""

import re
import signal
import socket
import threading
import time

import pytest

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rewards import RewardError, load
from rl_bridge.rewards.scoring_models import Judge, NoReply, RemoteRewardModel, Server
from rl_bridge.rollout.served.openai import OpenAIEndpoint
from tests.bridge.rewards.servers import said, serving
from tests.support.reward_batches import rows, trajectories, values

TEMPLATE = 'Question {prompt}, reply {completion}, truth {answer}. Write {"score": [[x]]}.'


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def judge(url, **options):
    fields = {"model": "small-judge", "template": TEMPLATE, "wait": 0.01, "timeout": 5.0, "maximum": 10.0} | options
    return Judge(url=f"{url}/v1", **fields)


def test_a_judge_reads_prompt_completion_and_columns_and_its_last_number_counts(tmp_path, monkeypatch):
    def reply(path, payload, number):
        content = payload["messages"][-1]["content"]
        return 200, said(f"first [[1]], then [[{content.count('b')}.5]]"), {}

    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(reply) as (url, asked):
        file = tmp_path / "style.toml"
        file.write_text(
            f"url = '{url}/v1/'\nmodel = 'small-judge'\nmaximum = 10\ntemplate = '''{TEMPLATE}'''\n"
            "system = 'You judge.'\napi_key_variable = 'JUDGE_KEY'\nmax_tokens = 9\n"
        )
        rewards = load([f"style=judge:{file}", "exact"])
        scored = rewards.score(trajectories("b", "bb", "2"))
    assert [t.rewards["style"] for t in scored] == pytest.approx([0.15, 0.25, 0.05], abs=1e-12)
    assert [t.rewards["exact"] for t in scored] == [0.0, 0.0, 1.0]
    assert {request["path"] for request in asked} == {"/v1/chat/completions"}
    assert {request["headers"]["Authorization"] for request in asked} == {"Bearer secret"}
    payload = next(r["payload"] for r in asked if "reply bb," in r["payload"]["messages"][1]["content"])
    assert payload == {
        "model": "small-judge",
        "temperature": 0.0,
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "You judge."},
            {"role": "user", "content": 'Question 1+0=, reply bb, truth 1. Write {"score": [[x]]}.'},
        ],
    }


MAY_PASS = (408, 425, 429, 500, 502, 503, 504, 529)
"""A timeout, a limit of the server, and a fault of it; 529 is that of an overloaded one."""


@pytest.mark.parametrize(
    "bad",
    [
        *((status, {"error": "slow down"}, {}) for status in MAY_PASS if status != 500),
        (500, b"<html>", {}),
        (503, b"", {"Retry-After": "0.01"}),
        (200, b'{"choices": [', {}),
        (200, b"garbage\r\n\r\n", {"X-Raw": "1"}),
        (200, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{", {"X-Raw": "1"}),
        (200, b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nno", {"X-Raw": "1"}),
    ],
    ids=[
        *(str(status) for status in MAY_PASS if status != 500),
        "500",
        "503 later",
        "malformed",
        "garbage",
        "cut",
        "cut error",
    ],
)
def test_what_may_pass_is_tried_again_up_to_a_limit(bad):
    with serving(lambda path, payload, number: bad if number < 3 else (200, said("[[5]]"), {})) as (url, asked):
        assert values(load(judge(url, retries=2, concurrency=1)), "a") == [0.5]
        assert len(asked) == 3
    with serving(lambda path, payload, number: bad) as (url, asked):
        message = r"row 1 failed: no usable reply from .*/chat/completions in 3 tries; the last: .*; completion 'a'"
        with pytest.raises(RewardError, match=message):
            values(load(judge(url, retries=2, concurrency=1)), "a")
        assert len(asked) == 3


def test_what_others_wait_for_ends_with_the_first_that_fails():
    def reply(path, payload, number):
        failed = "reply a," in payload["messages"][-1]["content"]
        return (400, {}, {}) if failed else (503, {}, {"Retry-After": "500"})

    with serving(reply) as (url, _):
        start = time.monotonic()
        with pytest.raises(RewardError, match=r"row 1 failed: .* replied with status 400"):
            values(load(judge(url)), "a", "b", "c")
        assert time.monotonic() - start < 120


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422, 426, 428, 430, 431, 451, 501, 505])
def test_a_wrong_request_is_not_tried_again(status):
    with serving(lambda path, payload, number: (status, {"error": "no such key"}, {})) as (url, asked):
        message = rf"row 1 failed: .*/v1/chat/completions replied with status {status}.*no such key"
        with pytest.raises(RewardError, match=message):
            values(load(judge(url)), "a")
        assert len(asked) == 1


@pytest.mark.parametrize("header", [{}, {"X-Trickle": "1"}], ids=["silent", "trickling"])
def test_a_server_that_takes_too_long(header):
    def reply(path, payload, number):
        if not header:
            time.sleep(0.6)
        return 200, said("[[5]]" + " " * 100), header

    with serving(reply) as (url, asked):
        with pytest.raises(
            RewardError, match=r"row 1 failed: no usable reply .* in 2 tries; the last: .*(timed out|0\.2 s)"
        ):
            values(load(judge(url, timeout=0.2, retries=1)), "a")
        assert len(asked) == 2


@pytest.mark.parametrize("asks", ["a judge", "an endpoint"])
def test_no_end_waits_for_a_server_that_hangs(asks):
    """Neither does the call that is interrupted, nor the process: Python joins every thread that is no daemon."""
    go = threading.Event()
    before = set(threading.enumerate())
    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))

    def reply(path, payload, number):
        if number == 2:
            interrupt.start()
        go.wait(30)
        return 200, {}, {}

    with serving(reply) as (url, asked):
        start = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                if asks == "a judge":
                    values(load(judge(url, timeout=30, concurrency=2)), *"abc")
                else:
                    endpoint = OpenAIEndpoint(url=url, model="m", api="completions", concurrency=2)
                    endpoint.complete(["a", "b", "c"], SamplingParams(n=1, max_new_tokens=2))
            taken = time.monotonic() - start
            left = [thread for thread in set(threading.enumerate()) - before if thread.name.endswith("request")]
        finally:
            go.set()
        for thread in left:
            thread.join(30)
        assert taken < 10 and len(asked) == 2, "the third has not begun"
        assert len(left) == 2 and all(thread.daemon for thread in left)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(RewardError, match=r"in 2 tries; the last: .*refused"):
        values(load(judge(url, retries=1)), "a")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (said("I like it"), r"row 2 failed: the judge's reply has no score .*: 'I like it'; completion 'bad'"),
        ({"choices": []}, r"row 2 failed: http.* replied with no chat completion: {'choices': \[\]}; completion 'bad'"),
        ([1], r"row 2 failed: http.* replied with no chat completion: \[1\]"),
        (said(None), r"row 2 failed: the judge's reply has no score .*: None"),
    ],
    ids=["no score", "no choice", "a list", "null"],
)
def test_replies_without_a_score_name_the_row(body, message):
    def reply(path, payload, number):
        return 200, body if "reply bad" in payload["messages"][-1]["content"] else said("[[1]]"), {}

    with serving(reply) as (url, _):
        with pytest.raises(RewardError, match=message):
            values(load(judge(url)), "good", "bad", "good")
        if body == said("I like it"):
            assert values(load(judge(url, missing=-1.0)), "good", "bad") == [0.1, -1.0]


def test_a_template_that_reads_a_column_that_no_row_has():
    with pytest.raises(
        RewardError, match=r"row 1 failed: the judge's template reads \{solution\}, and the row has \['_where', 'a"
    ):
        values(load(judge("http://127.0.0.1:9", template="{completion} {solution}")), "a")


@pytest.mark.parametrize(
    "template", ["rate this", "{prompt}", "{{ prompt }} {{ completion }}", "{} {}", "{Completion}", "completion"]
)
def test_a_template_without_the_completion_judges_nothing(template):
    """The policy would be trained on what the judge says of the prompt."""
    with pytest.raises(ValueError, match=r"^template must have the text that is judged, \{completion\} in"):
        judge("http://127.0.0.1:9", template=template)


def test_several_requests_wait_at_a_time():
    together = threading.Barrier(8, timeout=60)

    def reply(path, payload, number):
        together.wait()  # until all of them are there
        return 200, said("[[1]]"), {}

    with serving(reply) as (url, asked):
        assert values(load(judge(url, concurrency=8, timeout=60)), *"abcdefgh") == [0.1] * 8
        assert len(asked) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = ", r"style\.toml is not TOML"),
        ("url = 'http://a'\nmodle = 'x'", r"unknown fields \['modle'\], missing fields \['model', 'template'\]"),
        (
            "url = 'a'\nmodel = 'x'\ntemplate = ''",
            r"style\.toml: a server's url begins with http:// or https://",
        ),
        ("url = 'http://a'\nmodel = 'x'\ntemplate = ''\nscore = '('", "score is not a regular expression"),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nscore = 'a'",
            "score must have one group, the number, got 'a'",
        ),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nmaximum = 0",
            "maximum must be > 0, .* got maximum=0",
        ),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nmaximum = 'x'",
            "maximum must be a number, got 'x'",
        ),
        ("url = 'http://a'\nmodel = 'x'\ntemplate = ''\nmissing = nan", "missing must be finite, got nan"),
        ("url = 'http://a'\nmodel = 'x'\ntemplate = ''\nwait = nan", "wait ≥ 0"),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nmax_tokens = true",
            "max_tokens must be a whole number, got True",
        ),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nmax_tokens = 2.5",
            "max_tokens must be a whole number, got 2.5",
        ),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nretries = nan",
            "retries and concurrency must be whole",
        ),
        (
            "url = 'http://a'\nmodel = 'x'\ntemplate = ''\nconcurrency = 2.5",
            "retries and concurrency must be whole",
        ),
        ("url = 'http://a'\nmodel = 'x'\ntemplate = ''\ntimeout = 'x'", r"style\.toml: "),
        ("url = 'http://a'\nmodel = 'x'\ntemplate = ''\nretries = -1", "retries ≥ 0"),
    ],
)
def test_a_judge_file_that_cannot_serve(tmp_path, text, message):
    file = tmp_path / "style.toml"
    file.write_text(text.replace("template = ''", "template = '{completion}'"), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(f"judge:{file}")
    with pytest.raises(FileNotFoundError, match=r"no such judge file: .*absent\.toml"):
        load(f"judge:{tmp_path / 'absent.toml'}")


LEAST = {"max_tokens": 1, "maximum": 5e-324, "temperature": 0, "retries": 0, "concurrency": 1, "wait": 0}


@pytest.mark.parametrize(("name", "least"), LEAST.items(), ids=LEAST)
def test_the_least_limits_of_a_judge_are_taken_and_what_is_below_refused(name, least):
    words = {"url": "http://a", "model": "x", "template": "{completion}"}
    assert getattr(Judge(**words, **{name: least}), name) == least
    with pytest.raises(ValueError, match=name):
        Judge(**words, **{name: least - 1})


def test_a_remote_reward_model_scores_batches():
    def reply(path, payload, number):
        assert payload["prompts"] == [message[0]["content"] for message in payload["messages"]]
        pairs = zip(payload["query"], payload["labels"], strict=True)
        return 200, {"rewards": [len(text) + int(label) for text, label in pairs]}, {}

    with serving(reply) as (url, asked):
        assert values(load(f"{url}/get_reward"), "", "ab") == [4.0, 7.0]
        many = load(RemoteRewardModel(server=Server(url=url), batch=2), protocol="batch")
        assert values(many, "a", "b", "c") == [5.0, 6.0, 7.0]
    assert [request["path"] for request in asked] == ["/get_reward", "/", "/"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rewards": [1.0]}, "row 1 failed: .* replied 1 rewards for 2 completions"),
        ({"scores": [1.0, 2.0]}, "row 1 failed: .* replied with no list of rewards: {'scores'"),
        ({"rewards": [1.0, None]}, "row 2 returned None, expected a finite number; completion 'b'"),
        ({"rewards": [1.0, 1e39]}, "row 2 returned 1e[+]39, expected a finite number"),
    ],
)
def test_a_remote_reward_model_that_returns_nonsense(body, message):
    with serving(lambda path, payload, number: (200, body, {})) as (url, _), pytest.raises(RewardError, match=message):
        values(load(url), "a", "b")


def test_usr_20_the_limits_of_an_address_stand_behind_it_and_are_not_sent():
    made = load("http://127.0.0.1:9/score?k=1#timeout=0.5&retries=2&concurrency=3&wait=0&batch=4")
    model = made._rewards[0].function
    limits = Server(url="http://127.0.0.1:9/score?k=1", timeout=0.5, retries=2, concurrency=3, wait=0.0)
    assert model == RemoteRewardModel(server=limits, batch=4)
    assert made.fingerprint == load("http://127.0.0.1:9/score?k=1").fingerprint
    for words, wrong in (("timeout=x", "timeout=x"), ("tries=1", "tries=1"), ("batch=0", "batch must be at least 1")):
        with pytest.raises(ValueError, match=wrong):
            load(f"http://127.0.0.1:9/#{words}")


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://a b/", "http://a:x/", "http://[::1/", "http://a\n/"])
def test_usr_20_an_address_that_is_none_is_refused_at_once(url):
    with pytest.raises(ValueError, match="a server's url is http://HOST:PORT/PATH; this one"):
        load(url)


def test_usr_8_a_reply_has_a_bound_of_bytes_and_is_not_asked_for_again():
    with serving(lambda path, payload, number: (200, b" " * 5000, {})) as (url, asked):
        with pytest.raises(NoReply, match="replied with more than 4000 bytes"):
            Server(url=url, largest=4000).post({})
        assert len(asked) == 1
    assert Server(url="http://a").largest == 1 << 26


def test_limits_are_limits():
    for wrong in ({"timeout": 0}, {"retries": -1}, {"concurrency": 0}, {"url": "localhost"}):
        with pytest.raises(ValueError, match=re.escape(str(next(iter(wrong.values()))))):
            Server(**{"url": "http://localhost", **wrong})
    with pytest.raises(NoReply):
        Server(url="http://127.0.0.1:9", retries=0).post({})
    assert rows(1)
