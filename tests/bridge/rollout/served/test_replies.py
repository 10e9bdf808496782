"""Replies of vLLM's and SGLang's servers are believed where their parts fit together; what each is asked and told."""

import pytest

from rl_bridge.common.http import NoReply
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served import sglang, vllm_server
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import Ask, MalformedReply, field_of
from rl_bridge.rollout.served.sglang import SGLangOptions, SGLangServer, engine_seed

END = 9
ENDS = [
    ("stop", [5, END], "stop"),
    ("length", [5, 6], "length"),
    ("abort", [5], "abort"),
    ("abort", [5, END], "abort"),
    ("abort", [], "abort"),
    ("stop", [5, 6], None),
    ("length", [5, END], None),
    ("error", [5], None),
]


def ask(**options):
    return Ask("1", (1, 2), SamplingParams(max_new_tokens=4, **options), 7, 3, 4, frozenset([END, 2]))


def of_vllm(tokens, ended="length", **changes):
    rows = [{"token_id": token, "logprob": -token / 10} for token in tokens]
    spans = [{"version": "3", "start": 0, "end": len(tokens)}]
    fields = {"token_ids": tokens, "logprobs": {"content": rows}, "finish_reason": ended, "weight_versions": spans}
    return {"choices": [fields | changes], "usage": {}}


def of_sglang(tokens, ended="length", **changes):
    meta = {
        "finish_reason": {"type": ended},
        "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
        "output_token_sampling_mask": [[token + 1, token] for token in tokens],
        "output_token_sampling_logprobs": [-0.25] * len(tokens),
        "cached_tokens": 0,
    }
    return {"output_ids": tokens, "meta_info": meta | changes}


SERVERS = {"vLLM": (vllm_server.completion_of, of_vllm), "SGLang": (sglang.completion_of, of_sglang)}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("ended", "tokens", "reason"), ENDS)
def test_a_completion_ends_as_its_last_token_says_unless_it_was_aborted(server, ended, tokens, reason):
    completion_of, reply = SERVERS[server]
    if reason is None:
        with pytest.raises(MalformedReply, match=f"request 1 ended by '{ended}' after {len(tokens)} tokens"):
            completion_of(reply(tokens, ended), ask(), "request 1")
    else:
        completion = completion_of(reply(tokens, ended), ask(), "request 1")
        assert (completion.tokens, completion.reason, completion.versions) == (tokens, reason, [3] * len(tokens))
        assert completion.logprobs == [-token / 10 for token in tokens] and completion.allowed is None


@pytest.mark.parametrize("server", SERVERS)
def test_a_greedy_token_has_probability_one_whatever_the_server_says(server):
    completion_of, reply = SERVERS[server]
    assert completion_of(reply([5, 6]), ask(temperature=0.0), "request 1").logprobs == [0.0, 0.0]
    assert completion_of(reply([5, 6]), ask(temperature=0.5), "request 1").logprobs == [-0.5, -0.6]


@pytest.mark.parametrize("count", [0, 2])
def test_one_request_has_one_choice(count):
    reply = {"choices": of_vllm([5])["choices"] * count}
    with pytest.raises(MalformedReply, match=f"request 1 got {count} choices instead of 1"):
        vllm_server.completion_of(reply, ask(), "request 1")


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": []}], ids=str)
def test_an_aborted_request_that_drew_nothing_may_have_nothing(logprobs):
    reply = of_vllm([], "abort", token_ids=None, weight_versions=None, logprobs=logprobs)
    assert vllm_server.completion_of(reply, ask(), "request 1") == ([], [], None, [], "abort")


@pytest.mark.parametrize("rows", [[], [5], [6, 5], [5, 6, 7]], ids=str)
def test_log_probabilities_are_of_the_tokens_in_their_order(rows):
    logprobs = {"content": [{"token_id": token, "logprob": -1.0} for token in rows]}
    reply = of_vllm([5, 6], logprobs=logprobs)
    with pytest.raises(MalformedReply, match="request 1: log-probabilities of other tokens"):
        vllm_server.completion_of(reply, ask(), "request 1")
    with pytest.raises(MalformedReply, match="the probe got log-probabilities of other tokens"):
        vllm_server.probe_of(reply, [1])


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, {"cached_tokens": 0}, {"cached_tokens": 16}])
def test_a_probe_s_cached_tokens_are_those_that_the_server_counted(details):
    reply = of_vllm([5, 6]) | {"usage": {"prompt_tokens_details": details}}
    drawn = vllm_server.probe_of(reply, [1, 2])
    assert drawn == ((1, 2), (5, 6), (-0.5, -0.6), (details or {}).get("cached_tokens") or 0, "3")


@pytest.mark.parametrize(
    ("versions", "version"), [([], None), (["3"], "3"), (["3", "3"], "3"), (["3", "4"], None)], ids=str
)
def test_a_probe_is_of_a_version_where_it_is_of_one_alone(versions, version):
    spans = [{"version": one, "start": place, "end": place + 1} for place, one in enumerate(versions)]
    assert vllm_server.probe_of(of_vllm([5, 6], weight_versions=spans), [1]).version == version


def test_requests_say_what_was_asked_of_whom():
    fields = vllm_server.sampling_fields(ask(top_k=3, min_p=0.2))
    assert fields["extra_args"] == {"rl_fn": [7, 3, True, 0.2]} and fields["max_tokens"] == 4
    payload = sglang.request_of(ask())
    assert (payload["rid"], payload["input_ids"]) == ("1", [1, 2])
    assert payload["sampling_params"]["max_new_tokens"] == 4 and "return_sampling_mask" not in payload
    # The stop token is a part of the completion, and the rollout ends at its own stop tokens alone.
    kept = {name: payload["sampling_params"][name] for name in ("no_stop_trim", "ignore_eos", "skip_special_tokens")}
    assert kept == {"no_stop_trim": True, "ignore_eos": True, "skip_special_tokens": False}
    assert fields["stop_token_ids"] == payload["sampling_params"]["stop_token_ids"] == [2, END]
    cut = sglang.request_of(ask(top_k=3))
    assert (cut["return_sampling_mask"], cut["sampling_logprobs_mode"]) == (True, "selected")
    with pytest.raises(ValueError, match="SGLang may cut by top_k and top_p in another order"):
        sglang.request_of(ask(top_k=3, top_p=0.9))


def test_a_sequence_that_goes_on_has_another_seed_and_every_seed_has_31_bits():
    seeds = [engine_seed(seed, drawn) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for drawn in range(40)]
    assert len({*seeds}) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds) and max(seeds) > 2**30


def test_a_field_that_lacks_is_named_with_a_short_reply():
    assert field_of({"a": None}, "a") is None
    with pytest.raises(MalformedReply, match=r"a reply without 'b': \{'a': 'x{290,300}…$"):
        field_of({"a": "x" * 400}, "b")
    for whole in ([1], "x" * 298):
        with pytest.raises(MalformedReply) as raised:
            field_of(whole, "b")
        assert str(raised.value) == f"a reply without 'b': {whole!r}"


class Connection:
    """Stands for the HTTP connections to SGLang; ``errors``: what a path raises, by path."""

    def __init__(self):
        self.opened, self.posted, self.errors, self.replies = [], [], {}, {}

    def __call__(self, **options):
        self.opened.append(options)
        return self

    def get(self, path):
        if path in self.errors:
            raise self.errors[path]
        return {"weight_version": "5"}

    def post(self, payload, *, path, what, may_be_empty):
        self.posted.append((path, payload))
        if path in self.errors:
            raise self.errors[path]
        return self.replies.get(path, {"success": True})


@pytest.fixture
def connection(monkeypatch):
    connection = Connection()
    monkeypatch.setattr(sglang, "Server", connection)
    return connection


@pytest.fixture
def server(connection, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 13}')
    options = SGLangOptions(
        url="http://s/",
        max_model_len=64,
        page_size=16,
        headers=(("a", "b"),),
        start_seconds=0.1,
        request_seconds=7.0,
        control_seconds=8.0,
    )
    return SGLangServer(options, tmp_path)


def test_a_connection_has_the_options_limits_and_the_server_s_sizes(server, connection):
    assert {options.pop("timeout"): options for options in connection.opened} == {
        seconds: {"url": "http://s", "headers": (("a", "b"),), "retries": 0} for seconds in (7.0, 8.0, 5.0)
    }
    assert server.limits == (13, 64, 16) and not server.is_paused() and server.version() == "5"


def test_the_cache_is_flushed_once_an_update_s_folder_is_loaded_and_each_folder_once(server, connection, tmp_path):
    connection.posted.clear()
    assert server.reset_prefix_cache()
    for _ in range(2):
        server.start()
        assert not server.reset_prefix_cache()
        for names in (["a"], ["b"]):
            server.update(tmp_path, names)
        assert server.reset_prefix_cache()
    loads = [payload for path, payload in connection.posted if path == "/update_weights_from_disk"]
    assert len(loads) == 2 and {load["model_path"] for load in loads} == {str(tmp_path)}
    assert all(load["flush_cache"] and load["keep_pause"] and not load["abort_all_requests"] for load in loads)


@pytest.mark.parametrize(
    ("status", "alive", "error"),
    [
        (400, True, ValueError),
        (499, False, ValueError),
        (500, True, RuntimeError),
        (500, False, ServerDied),
        (None, True, RuntimeError),
        (None, False, ServerDied),
    ],
)
def test_a_refusal_is_the_request_s_and_a_server_is_dead_where_it_does_not_reply(
    server, connection, status, alive, error
):
    connection.errors = {"/generate": NoReply("no", status)} | ({} if alive else {"/model_info": NoReply("gone")})
    with pytest.raises(error) as raised:
        server.draw(ask())
    assert type(raised.value) is error and server.dead() is not alive


def test_a_command_that_did_not_succeed_is_an_error(server, connection):
    for success in (False, None, "yes"):
        connection.replies = {"/update_weight_version": {"success": success, "message": "busy"}}
        with pytest.raises(RuntimeError, match="SGLang's update_weight_version failed: busy"):
            server.stamp("3")


def test_a_probe_draws_past_every_end_and_says_what_was_cached_and_of_which_version(server, connection):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    for versions, version in ((spans[:1], "3"), (spans, None)):
        tokens = [5, END][: len(versions)]
        connection.replies = {"/generate": of_sglang(tokens, weight_versions=versions, cached_tokens=6)}
        drawn = server.probe([1, 2], count=len(tokens), seed=3, temperature=0.5)
        logprobs = tuple(-token / 10 for token in tokens)
        assert drawn == ((1, 2), tuple(tokens), logprobs, 6, version)
        fields = connection.posted[-1][1]["sampling_params"]
        assert (fields["stop_token_ids"], fields["temperature"], fields["max_new_tokens"]) == ([], 0.5, len(tokens))
        assert fields["sampling_seed"] == engine_seed(3, 0), "as any sequence without a token of the policy"
