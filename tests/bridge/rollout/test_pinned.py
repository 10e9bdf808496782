"""MUSA-2, S24: a request says every number of sampling, so that no engine takes one from its model's folder."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.messages import Chat
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.sampling import truncation
from rl_bridge.rollout.served.openai import EXTENSIONS, OpenAIEndpoint
from rl_bridge.rollout.served.protocol import Ask
from rl_bridge.rollout.served.served_rollout import ServedRollout
from rl_bridge.rollout.served.sglang import request_of
from rl_bridge.rollout.served.vllm_server import sampling_fields
from rl_bridge.rollout.vllm.request_fields import probe_fields
from rl_train.policy_options import PolicyPipeline

NEUTRAL = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
ASKED = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 5, "min_p": 0.1}]
ASKED += [{"temperature": 0.0, "top_k": 5, "min_p": 0.1}]


def endpoint_fields(sampling, api, **options):
    return OpenAIEndpoint(url="http://x/v1", model="m", api=api, **options)._request(Chat("ab"), sampling, 3)


def asked(sampling):
    return Ask("1", (1, 2), sampling, 7, 0, 4, frozenset([1]))


ENGINES = {
    "vLLM's server": lambda sampling: sampling_fields(asked(sampling)),
    "SGLang": lambda sampling: request_of(asked(sampling))["sampling_params"],
    "chat": lambda sampling: endpoint_fields(sampling, "chat"),
    "completions": lambda sampling: endpoint_fields(sampling, "completions"),
}


def wanted(sampling, engine):
    numbers = {"temperature": sampling.temperature} | NEUTRAL | truncation(sampling)
    return numbers | ({"min_p": 0.0} if "vLLM" in engine else {})  # the hook in the sampler cuts by it


@pytest.mark.parametrize("options", ASKED, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_number_is_in_the_request(engine, options):
    sampling = SamplingParams(max_new_tokens=4, **options)
    fields, numbers = ENGINES[engine](sampling), wanted(sampling, engine)
    assert {name: fields.get(name) for name in numbers} == numbers
    if engine == "vLLM's server":
        assert fields["extra_args"]["rl_fn"][2:] == [bool(truncation(sampling)), truncation(sampling).get("min_p", 0.0)]


@pytest.mark.parametrize("temperature", [1e-30, 0.0099])
@pytest.mark.parametrize(
    "draws",
    [
        lambda sampling: sampling_fields(asked(sampling)),
        lambda sampling: probe_fields(max_tokens=2, seed=1, temperature=sampling.temperature),
        lambda sampling: ServedRollout.__new__(ServedRollout).decoder(sampling),
        lambda sampling: PolicyPipeline(
            policy=PolicyConfig(steps=1, prompts_per_step=1, sampling=sampling), rollout=RolloutOptions(backend="vllm")
        ),
        lambda sampling: PolicyPipeline(
            policy=PolicyConfig(steps=1, prompts_per_step=1, sampling=sampling),
            rollout=RolloutOptions(backend="vllm_server"),
        ),
    ],
    ids=["a request", "a probe", "a decoder", "the options", "the options of a server"],
)
def test_a_temperature_in_the_place_of_which_vllm_takes_another_is_refused(draws, temperature):
    """The trainer would score at the one that was asked for."""
    sampling = SamplingParams(max_new_tokens=4, temperature=temperature)
    with pytest.raises(ValueError, match=r"vLLM draws at no temperature between 0 and 0\.01.* take 0, for the most"):
        draws(sampling)
    assert sampling_fields(asked(replace(sampling, temperature=0.01)))["temperature"] == 0.01


@pytest.mark.vllm
@pytest.mark.parametrize("options", ASKED, ids=str)
def test_vllm_takes_no_default_for_what_is_sent(options):
    """Its own code for both APIs of the endpoint, and for the engine in this process."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from rl_bridge.rollout.vllm.vllm_engine import vllm_sampling

    class Defaults(dict):
        def get(self, name, default=None):
            read.append(name)
            return default

    sampling, read = SamplingParams(max_new_tokens=4, **options), []
    in_process = vllm_sampling(sampling, seed=3, limit=4, stop=[1])
    made = {"in process, vLLM": in_process}
    for api, kind in (("chat", ChatCompletionRequest), ("completions", CompletionRequest)):
        made[api] = kind(**endpoint_fields(sampling, api)).to_sampling_params(4, Defaults())
    assert set(read) <= {"stop_token_ids", "max_tokens"}
    for engine, params in made.items():
        numbers = wanted(sampling, engine)
        if sampling.temperature == 0:
            numbers["top_k"] = params.top_k  # vLLM makes 0 of it, the same
        assert {name: getattr(params, name) for name in numbers} == numbers
        assert not (params.logit_bias or params.bad_words or params.allowed_token_ids or params.min_tokens)


def test_a_server_of_the_bare_protocol_gets_nothing_else_and_makes_no_trajectories():
    sampling = SamplingParams(max_new_tokens=4)
    fields = endpoint_fields(sampling, "chat", protocol_only=True)
    assert not fields.keys() & EXTENSIONS
    assert (fields["top_p"], fields["presence_penalty"], fields["frequency_penalty"]) == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="token_ids is an extension"):
        OpenAIEndpoint(url="http://x", model="m", protocol_only=True, token_ids=True)
    for cut in ({"top_k": 3}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match=f"no {next(iter(cut))}, and protocol_only"):
            OpenAIEndpoint(url="http://x", model="m", protocol_only=True).complete(
                ["ab"], SamplingParams(max_new_tokens=4, **cut)
            )


@pytest.mark.parametrize(
    ("engine", "cuts", "refused"),
    [
        ("SGLang", {"top_k": 5, "top_p": 0.8}, True),
        ("SGLang", {"top_p": 0.8, "min_p": 0.1}, False),
        ("SGLang", {"top_k": 5, "min_p": 0.1}, False),
        ("endpoint", {"top_k": 5, "top_p": 0.8}, True),
        ("endpoint", {"top_p": 0.8, "min_p": 0.1}, True),
        ("endpoint", {"top_k": 5, "top_p": 1.0, "min_p": 0.1}, False),
        ("vLLM's server", {"top_k": 5, "top_p": 0.8, "min_p": 0.1}, False),
    ],
)
def test_truncations_whose_order_is_not_this_librarys_are_refused_together(engine, cuts, refused):
    """ROLL-8: SGLang's sampler takes top-k and top-p jointly unless min-p is there; an endpoint may be anything."""
    sampling = SamplingParams(max_new_tokens=4, **cuts)

    def ask():
        if engine == "endpoint":
            OpenAIEndpoint(url="http://x", model="m")._require_sent(sampling)
        else:
            ENGINES[engine](sampling)

    both = " and ".join(cuts)
    with pytest.raises(ValueError, match=f"may cut by {both} in another order") if refused else nullcontext():
        ask()


@pytest.mark.parametrize(
    "name", ["top_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "structured_outputs"]
)
def test_trajectories_refuse_what_else_may_change_the_distribution(name):
    """Log-probabilities of the protocol are those before."""
    endpoint = OpenAIEndpoint(url="http://x", model="m", token_ids=True, extra=((name, 1), ("user", "a")))
    with pytest.raises(ValueError, match=f"extra has {name}, which may change what is sampled"):
        endpoint.trajectories(["ab"], SamplingParams(max_new_tokens=4))
