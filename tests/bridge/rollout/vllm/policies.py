"""A tiny policy: its trainer, whose weights change when they are told to, and the least worker that takes them over."""

from functools import partial

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.engines.dispatch import returns
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import TakesProvedWeights, UpdatedEngine
from tests.bridge.rollout.vllm.double import open_double

OPTIONS = {"max_model_len": 96, "max_num_seqs": 8, "kv_cache_gib": 0.02, "arguments": ("block_size=32",)}
PROMPT = tuple(3 + 5 * place % 40 for place in range(40))
RUNNING = PROMPT[::-1]


# Heads of 32 are the smallest that vLLM computes on a CPU; it pads a vocabulary of 60 to 64.
_SIZES = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


def make_model(*, tied=False):
    """A Qwen2 whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = Qwen2Config(**_SIZES, **_HEADS, eos_token_id=1, bos_token_id=0, tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def options(**changed):
    return VLLMOptions(**OPTIONS | changed)


def open_vllm(folder, draws=None, **changed):
    """Real vLLM in this process; ``draws``: that a decoder reads allowed tokens from."""
    from rl_bridge.rollout.vllm.client import open_in_process

    return open_in_process(folder, options(**changed), draws=draws)


ENGINES = [pytest.param(open_double, id="double"), pytest.param(open_vllm, id="vllm", marks=pytest.mark.vllm)]


class Policy(TokenScorer):
    """Scores tokens; ``advance`` changes the weights as a number of updates would, the same each time."""

    steps = 0

    @returns("same")
    def weights_version(self):
        return self.steps

    @returns("same")
    @torch.no_grad()
    def advance(self, size=0.02):
        self.steps += 1
        noise = torch.Generator().manual_seed(self.steps)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise).to(parameter.dtype), alpha=size)

    @returns("same")
    @torch.no_grad()
    def advance_adapter(self, size=0.1):
        """What updates of an adapter change."""
        self.steps += 1
        noise = torch.Generator().manual_seed(self.steps)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=size)


class Rollout(TakesProvedWeights):
    """Holds an engine and gives it what came."""

    def __init__(self, client_of, folder, precision="fp32", **changed):
        self.updated = UpdatedEngine(client_of(folder), folder, tolerance=Tolerance.of(precision), **changed)

    @property
    def client(self):
        return self.updated.client


def trainer(model, executor, *, name="policy", adapter=False, dtype="float32", temperature=1.0):
    source = StateSource(model)
    if adapter:
        source = LoRASource(source, rank=4, alpha=8.0, use_rslora=True)
    scoring = ScoringConfig(temperature=temperature, dtype=dtype)
    return TrainEngine(partial(Policy, source, scoring), executor=executor, name=name).build()


def rollout(client_of, folder, executor, **options):
    """The engine, and its worker: the slot is this process."""
    engine = InferenceEngine(partial(Rollout, client_of, folder, **options), executor=executor, name="rollout").build()
    return engine, worker_of(engine)


def worker_of(engine):
    return engine.executor._host.workers[engine.name].module


@torch.no_grad()
def gap(drawn, model):
    """The largest distance of the log-probabilities that were drawn with from those of the model, in nats."""
    scores = torch.log_softmax(model(torch.tensor([drawn.sequence])).logits[0].float(), -1)
    first = len(drawn.prompt) - 1
    own = torch.tensor([scores[first + place, token] for place, token in enumerate(drawn.tokens)])
    return float((own - torch.tensor(drawn.logprobs)).abs().max())


def draw(client, *, prompt=PROMPT, count=12, seed=3):
    return client.generate(prompt, count=count, seed=seed, temperature=1.0)


def start_request(client, name, count=30):
    """A request with a few tokens drawn."""
    client.add_request(name, {"prompt_token_ids": list(RUNNING)}, request(client, count))
    for _ in range(5):
        assert not client.step()


def request(client, count, seed=9):
    """Sampling parameters as the client's engine has them."""
    return client._sampling(max_tokens=count, seed=seed, temperature=1.0)


def ends_of(client):
    """What the running requests end with."""
    ended = []
    while client.has_unfinished_requests():
        ended += [output for output in client.step() if output.finished]
    return ended
