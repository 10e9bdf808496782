"""No token has a place beyond the model's positions: in no engine, environment, rollout ahead or trainer."""

import contextlib
import copy
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Request, RowRequest, SamplingParams, single_turn
from rl_bridge.engines import InferenceEngine
from rl_bridge.engines.worker import torch_worker
from rl_bridge.environments import Step
from rl_bridge.environments.functions import FunctionTools
from rl_bridge.models.model_source import StateSource, ValueSource
from rl_bridge.models.own_model import own_source
from rl_bridge.models.row_checks import require_as_long
from rl_bridge.models.tool_calls import ToolCall
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.modules.value import ValueScorer
from rl_bridge.pipelines.rollout_options import EnvironmentOptions, talking
from rl_bridge.rewards import load
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.pumps import Pace
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.served import served_rollout
from rl_bridge.rollout.served.served_rollout import ServedRollout
from tests.bridge.rollout.ahead.runs import CONFIG, SOURCE, TOKENIZER, Weights, ahead, shown, steps_of
from tests.support.own_models import Tiny

POSITIONS = 24
STOPS = [TOKENIZER.eos_token_id, *TOKENIZER.convert_tokens_to_ids(["0", "3", "7", "+"])]
SAMPLING = SamplingParams(max_new_tokens=6, n=4, seed=4)
REQUESTS = [RowRequest({"prompt": prompt}, (4, place), place) for place, prompt in enumerate(["1+1=", "7", "12+34="])]
SMALL = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


class Short(Tiny):
    """Undecided, so that a turn ends soon."""

    max_positions = POSITIONS

    def forward(self, input_ids, position_ids, attention_mask=None):
        return 0.01 * super().forward(input_ids, position_ids, attention_mask)


def made(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return StateSource(make().eval())


def tiny():
    return replace(SOURCE, max_positions=POSITIONS)


def learned():
    sizes = {"n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return made(lambda: GPT2LMHeadModel(GPT2Config(**SMALL, **sizes)))


def dynamic():
    """Its rows are bounded by one less than its positions."""
    rotary = {"max_position_embeddings": POSITIONS + 1, "rope_parameters": DYNAMIC}
    return made(lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **WIDTHS, **rotary)))


def uncached():
    return own_source(Short, TOKENIZER)


class Talks:
    """Answers for ever, each time with as many characters as ``words``."""

    words = "=12+34"

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        return Step(messages=[{"role": "tool", "content": self.words}], reward=1.0)


class Lectures(Talks):
    words = "=" * 2 * POSITIONS


TOOLS = FunctionTools({"count": lambda: 12345}, (), lambda text: [ToolCall("count", {})])


class Rollout(InProcessRollout):
    """An untrained model says one of five tokens soon enough, and its turn is over."""

    def __init__(self, source):
        super().__init__(source, TOKENIZER)
        self._stop = frozenset(STOPS)


def tokens_of(groups):
    return [[t.tokens for t in group] for group in groups]


def law(trajectories):
    """Every row fits, and some fill the positions."""
    lengths = [len(t.tokens) for t in trajectories]
    assert max(lengths) <= POSITIONS and all(any(t.loss_mask) for t in trajectories)
    assert {t.finish_reason for t in trajectories} == {"length"}
    return lengths


@pytest.mark.parametrize("environment", [Talks, Lectures, TOOLS], ids=["short", "long", "tools"])
@pytest.mark.parametrize("make", [tiny, learned, dynamic, uncached])
def test_conversations_end_by_length_where_the_positions_end(make, environment):
    rollout = Rollout(make())
    groups = rollout.converse(REQUESTS, SAMPLING, environment, 9)
    lengths = law([t for group in groups for t in group])
    assert POSITIONS in lengths or environment is Lectures
    # Rows lie beside others as environments answer, so that floats may differ in the last bit.
    assert tokens_of(rollout.converse(REQUESTS, SAMPLING, environment, 9, max_tokens=POSITIONS)) == tokens_of(groups)


def test_positions_that_are_left_change_nothing():
    limited = Rollout(SOURCE).converse(REQUESTS, SAMPLING, Talks, 9, max_tokens=POSITIONS)
    assert tokens_of(Rollout(tiny()).converse(REQUESTS, SAMPLING, Talks, 9)) == tokens_of(limited)


def test_conversations_ahead_end_there_too():
    pace = Pace(partial=True, rounds=2, steps=2, limit=6)
    engine = InferenceEngine(lambda: Rollout(tiny())).build()
    config = replace(CONFIG, steps=2, sampling=replace(CONFIG.sampling, max_new_tokens=6))
    limits = {"max_turns": 9, "max_tokens": None, "step_timeout": 60.0, "processes": 0}
    held = talking(engine, Talks, TOKENIZER, config.sampling.max_new_tokens, **limits)
    sampler = ahead(engine, pace=pace, staleness=1, reward=load(("environment",)), config=config, talking=held)
    try:
        assert POSITIONS in law(shown(steps_of(sampler, Weights(), engine, range(2))))
    finally:
        sampler.close()
    assert held.template.ends(STOPS[1]), "the engine says what ends a turn"


@pytest.mark.parametrize("make", [tiny, learned])
def test_a_decoder_s_row_ends_by_length_where_the_positions_end(make):
    """Rounds of rollouts that run ahead put rows in by their limit alone."""
    rollout = Rollout(make())
    decoder = CachedDecoder(rollout._model, SAMPLING, stop=[])
    decoder.add("row", [5] * (POSITIONS - 3), seed=1, limit=POSITIONS)
    rows = decoder.round(POSITIONS)
    assert [(len(row.tokens), row.reason) for row in rows] == [(3, "length")]
    with pytest.raises(ValueError, match=rf"{POSITIONS} tokens leaves no room .* holds {POSITIONS} \(max_model_len, o"):
        decoder.add("full", [5] * POSITIONS, seed=1, limit=1)


@pytest.mark.parametrize("make", [dynamic, uncached])
def test_what_cannot_fit_is_refused_by_its_numbers(make, caplog):
    rollout = Rollout(make())
    fits = [Request(prompt="1" * (POSITIONS - 6), id=(4, 0))]
    assert len(rollout.generate(fits, SAMPLING)[0]) == SAMPLING.n
    with pytest.raises(ValueError, match=rf"{POSITIONS - 5} tokens and 6 new ones .* holds, {POSITIONS} \(max"):
        rollout.generate([Request(prompt="1" * (POSITIONS - 5), id=(4, 0))], SAMPLING)
    with pytest.raises(ValueError, match=rf"conversations of {POSITIONS + 1} tokens .* engine holds, {POSITIONS} "):
        rollout.converse(REQUESTS, SAMPLING, Talks, 2, max_tokens=POSITIONS + 1)
    rows = [RowRequest({"prompt": "1" * length, "_where": f"row {length}"}, (4, length)) for length in (POSITIONS, 3)]
    with caplog.at_level(logging.WARNING):
        (long, *_), (short, *_) = rollout.converse(rows, SAMPLING, Talks, 2)
    assert (long.finish_reason, len(long.tokens), long.turns) == ("error", 1, 0) and short.turns
    assert f"row {POSITIONS}, turn 0: ValueError: the environment opens with {POSITIONS} tokens" in caplog.text
    with pytest.raises(ValueError, match=rf"failed in all 4 conversations; row {POSITIONS}.* holds {POSITIONS}"):
        rollout.converse(rows[:1], SAMPLING, Talks, 2)


@pytest.mark.parametrize(("make", "holds"), [(dynamic, 4 * POSITIONS), (tiny, 4 * POSITIONS), (dynamic, 12)])
def test_a_served_engine_draws_no_more_than_the_trainer_reads(make, holds, monkeypatch):
    """An engine may hold more, as vLLM multiplies positions by a rotary factor, or less."""
    limits = SimpleNamespace(longest=holds, vocabulary=None)
    engine = SimpleNamespace(limits=lambda: limits, close=lambda: None, forget=lambda rows: None)
    monkeypatch.setattr(served_rollout, "ServedEngine", lambda *arguments, **options: engine)
    monkeypatch.setattr(served_rollout, "UpdatedEngine", lambda *arguments, **options: None)
    monkeypatch.setattr(served_rollout, "checkpoint", lambda *arguments: (None, None))
    worker, bound = ServedRollout.__new__(ServedRollout), min(POSITIONS, holds)
    worker._connect(make(), TOKENIZER, None, dtype=torch.float32, precision="fp32", at_once=1, restarts=0)
    assert worker.ends()[1] == worker.longest == bound
    assert worker.narrower() == (bound if holds < POSITIONS else None)
    with pytest.raises(ValueError, match=rf"the engine holds {bound} \(max_model_len, or the model's positions\)"):
        worker.decoder(SAMPLING).add("long", [2] * bound, seed=0, limit=1)


@pytest.mark.parametrize("scorer", [TokenScorer, ValueScorer])
def test_a_trainer_reads_no_token_beyond_the_positions(scorer):
    """Rows of a loop, and conversations for a critic or teacher with fewer positions than the policy."""
    source = ValueSource(tiny(), pad_token=0) if scorer is ValueScorer else tiny()
    module = torch_worker(lambda: scorer(source), None, torch.device("cpu"), generators())
    read = module.values if scorer is ValueScorer else module.token_logprobs
    rows = [single_turn([5, 6], [7] * (length - 2), group=length) for length in (POSITIONS, POSITIONS + 1)]
    assert read(collate(rows[:1], 0)).shape[1] == POSITIONS
    with pytest.raises(ValueError, match=rf"a row has {POSITIONS + 1} tokens, and Qwen2.* has {POSITIONS} positions"):
        read(collate(rows, 0))


def test_a_run_s_limit_beyond_the_positions_is_refused_before_it_begins():
    options = EnvironmentOptions(environment="no_such.py:Talks", max_trajectory_tokens=POSITIONS + 1)
    with pytest.raises(ValueError, match=r"25 tokens \(max_tokens, --max-trajectory-tokens\) .* engine holds, 24"):
        options.environments(tiny())


@pytest.mark.parametrize(
    "prompt, conversation, refusal",
    [
        (3, None, None),
        (4, None, r"the critic cannot read .* row 1: the row has 4 tokens and 21 are sampled behind; .* 24 positions"),
        (4, POSITIONS, None),
        (
            4,
            POSITIONS + 1,
            "the critic has 24 positions, and a conversation may have more tokens: take --max-traj.* 24,",
        ),
        (4, math.inf, "or another critic"),
    ],
)
def test_a_model_beside_the_policy_with_fewer_positions_is_refused_before_a_run(prompt, conversation, refusal):
    beside, policy = ValueSource(tiny(), pad_token=0), replace(SOURCE, max_positions=2 * POSITIONS)
    options = {"new_tokens": POSITIONS - 3, "conversation": conversation, "role": "critic"}
    rows = [{"prompt": "1" * prompt}]
    with contextlib.nullcontext() if refusal is None else pytest.raises(ValueError, match=refusal):
        require_as_long(beside, policy, TOKENIZER, rows, **options)
    require_as_long(policy, ValueSource(tiny(), pad_token=0), TOKENIZER, rows, **options)
    # A policy that counts no positions says as much as the model beside it cannot read.
    endless = SimpleNamespace(empty=lambda: torch.nn.Linear(1, 1))
    with contextlib.nullcontext() if conversation == POSITIONS or refusal is None else pytest.raises(ValueError):
        require_as_long(beside, endless, TOKENIZER, rows, **options)


def test_rows_that_the_policy_cannot_read_are_not_the_critic_s_matter():
    beside, rows = ValueSource(tiny(), pad_token=0), [{"prompt": "1" * 2 * POSITIONS}]
    require_as_long(beside, tiny(), TOKENIZER, rows, new_tokens=1, conversation=None, role="critic")


@pytest.mark.parametrize("environment", [None, "no_such.py:Talks"])
@pytest.mark.parametrize("field", ["prompt", "messages"])
@pytest.mark.parametrize(
    ("holds", "refusal"),
    [
        (None, None),
        (POSITIONS, None),
        (POSITIONS - 1, r"^b.jsonl, row 2: the row has 4 tokens and 20 are sampled behind; .* holds 23 "),
    ],
)
def test_rows_that_an_engine_does_not_hold_are_refused_before_a_warm_start(environment, field, holds, refusal):
    """An engine may hold fewer tokens than the model has positions (vLLM's max_model_len). Conversations are apart."""
    rollout = SimpleNamespace(ends=lambda: (frozenset(), holds), narrower=lambda: holds)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{{ messages[0].content }}"
    contents = [(f"b.jsonl, row {length - 2}", "1" * length) for length in (3, 4)]
    rows = [
        {field: text if field == "prompt" else [{"role": "user", "content": text}], "_where": where}
        for where, text in contents
    ]
    options, sampling = EnvironmentOptions(environment=environment), SamplingParams(max_new_tokens=POSITIONS - 4)
    refused = environment is None and refusal
    with pytest.raises(ValueError, match=refusal) if refused else contextlib.nullcontext():
        options.require_engine(rollout, rows, tokenizer, sampling)


def test_rows_that_were_compared_with_the_model_are_not_encoded_again_for_an_engine_that_holds_as_much():
    rollout, tokenizer = InProcessRollout(tiny(), TOKENIZER), None
    assert rollout.ends()[1] == POSITIONS and rollout.narrower() is None
    EnvironmentOptions().require_engine(rollout, [{"prompt": "1"}], tokenizer, SamplingParams(max_new_tokens=2))
