"""A double of vLLM's ``LLMEngine``: the model is transformers', the scheduler a loop over the requests.

It keeps what an update depends on: keys and values outlive the weights that made them until they are cleared, requests
that draw while layers are in pieces fail, outputs are stamped with versions. test_contract.py holds it to the real one.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rl_bridge.rollout.inside_vllm.plugin import PROTOCOL
from rl_bridge.rollout.vllm.client import InProcessEngine
from rl_bridge.rollout.vllm.weight_copies import header_of, mapped
from rl_bridge.weights.manifest import Manifest, compare

BLOCK, LONGEST, SEATS = 32, 96, 3


@dataclass
class Params:
    """The double's sampling parameters."""

    max_tokens: int
    seed: int
    temperature: float = 1.0

    def clone(self):
        return replace(self)


@dataclass
class Running:
    prompt: list
    params: Params
    generator: torch.Generator
    past: DynamicCache | None = None
    cached: int | None = None
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)


class DoubleEngine:
    """The methods that ``InProcessEngine`` calls, on itself and as its own core."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._own = Manifest(header_of(Path(folder)))
        model = SimpleNamespace(get_vocab_size=lambda: self.model.config.vocab_size, max_model_len=LONGEST)
        cache = SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True)
        device = SimpleNamespace(device_type="cpu")
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache, device_config=device)
        self.engine_core = SimpleNamespace(engine_core=self)
        self.scheduler = self
        self.waiting, self.running, self._prefixes, self._paused = {}, {}, {}, False
        self.steps = 0
        self._version, self._active, self._broken, self._left = "default", False, None, None
        self.closed = False

    # Requests.

    def add_request(self, request_id, prompt, params):
        generator = torch.Generator().manual_seed(params.seed)
        self.waiting[request_id] = Running(list(prompt["prompt_token_ids"]), params, generator)

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            self.running.pop(request_id, None)

    @torch.no_grad()
    def step(self):
        if self._paused or not (self.waiting or self.running):
            return []
        if self._left is not None:
            raise RuntimeError("a layer is on the meta device")
        self.steps += 1
        for name in list(self.waiting)[: SEATS - len(self.running)]:
            self.running[name] = self.waiting.pop(name)
        for request in self.running.values():
            self._draw(request)
        ended = {name: one for name, one in self.running.items() if len(one.tokens) == one.params.max_tokens}
        for name in ended:
            del self.running[name]
        return [self._output(name, request) for name, request in ended.items()]

    def _draw(self, request):
        sequence = request.prompt + request.tokens
        if request.past is None:
            request.past, known = self._prefix(request.prompt)
            request.cached = known if request.cached is None else request.cached
        known = request.past.get_seq_length()
        output = self.model(torch.tensor([sequence[known:]]), past_key_values=request.past, use_cache=True)
        self._keep(request)
        scores = torch.log_softmax(output.logits[0, -1].float() / request.params.temperature, -1)
        token = int(torch.multinomial(scores.exp(), 1, generator=request.generator))
        request.tokens.append(token)
        request.logprobs.append({token: SimpleNamespace(logprob=float(scores[token]))})
        request.versions.append(self._version)

    def _prefix(self, prompt):
        for length in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if tuple(prompt[:length]) in self._prefixes:
                return copy.deepcopy(self._prefixes[tuple(prompt[:length])]), length
        return DynamicCache(config=self.model.config), 0

    def _keep(self, request):
        length = len(request.prompt) // BLOCK * BLOCK
        if length and tuple(request.prompt[:length]) not in self._prefixes:
            past = copy.deepcopy(request.past)
            if beyond := past.get_seq_length() - length:
                past.crop(-beyond)
            self._prefixes[tuple(request.prompt[:length])] = past

    @staticmethod
    def _output(name, request):
        starts = [i for i, version in enumerate(request.versions) if not i or version != request.versions[i - 1]]
        ends = [*starts[1:], len(request.versions)]
        spans = [
            SimpleNamespace(version=request.versions[a], start=a, end=b) for a, b in zip(starts, ends, strict=True)
        ]
        drawn = SimpleNamespace(token_ids=request.tokens, logprobs=request.logprobs, weight_versions=spans)
        return SimpleNamespace(request_id=name, finished=True, num_cached_tokens=request.cached, outputs=[drawn])

    # The scheduler.

    def pause_scheduler(self, mode, clear_cache):
        assert mode == "keep"
        self._paused = True
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def sleep(self, level, mode):
        # On a CPU any other level is the same, and a warning.
        self.pause_scheduler(mode, clear_cache=level >= 1)

    def wake_up(self, tags=None):
        self.resume_scheduler()

    def resume_scheduler(self):
        self._paused = False

    def is_scheduler_paused(self):
        return self._paused

    def reset_prefix_cache(self, reset_running_requests=False):
        if self.running and not reset_running_requests:
            return False
        self._prefixes.clear()
        self.waiting, self.running = {**self.running, **self.waiting}, {}
        for request in self.waiting.values():
            request.past = None
        return True

    def set_weight_version(self, version):
        self._version = version

    def get_weight_version(self):
        return self._version

    # An update, as FolderTransfer in vLLM's worker does it.

    def collective_rpc(self, method, args=(), kwargs=None):
        if callable(method):
            config = SimpleNamespace(dtype=torch.float32)
            return [
                method(
                    SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: self.model, model_config=config)),
                    *args,
                )
            ]
        return getattr(self, f"_{method}")(**kwargs or {})

    def _init_weight_transfer_engine(self, init_info):
        if init_info != {"protocol": PROTOCOL}:
            raise ValueError(f"Invalid init_info: {init_info}")

    def _start_weight_update(self):
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        if self._broken:
            raise RuntimeError(f"this engine must be replaced: {self._broken}")
        self._active = True

    def _update_weights(self, update_info):
        if not self._active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        folder, names = Path(update_info["folder"]), update_info["names"]
        try:
            tensors = mapped(folder)
            compare(Manifest(header_of(folder)), self._own, "update")
            left = set(tensors) if self._left is None else self._left
            if again := set(names) - left:
                raise ValueError(f"weight {min(again)!r} came twice in this update, or is unknown")
        except Exception as error:
            self._active = False
            self._broken = self._left is not None and str(error)
            raise
        self._left = left - set(names)
        self.model.load_state_dict({name: tensors[name] for name in names}, strict=False)

    def _finish_weight_update(self):
        if not self._active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        if self._left is None or self._left:
            self._broken = "the update ended before all came"
            raise ValueError(self._broken)
        self.model.tie_weights()
        self._active, self._left = False, None


def open_double(folder):
    """The double behind the same client as a real engine."""

    def close(engine):
        engine.closed = True

    return InProcessEngine(DoubleEngine, close, folder, sampling=Params)
