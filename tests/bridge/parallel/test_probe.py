"""The comparison at build: what differs from a model's own eager forward is not used, or the model is refused."""

import itertools

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GenerationMixin,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.lfm2 import modeling_lfm2

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.parallel import probe as probing
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.parallel.attention.register import NAME
from rl_bridge.parallel.probe import plain_values, probe, with_attention
from tests.support import one_step
from tests.support.attending_models import SIZES, tiny
from tests.support.ranks import as_rank, found_by_ranks
from tests.support.ready import ready


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(probing, "_cached", {})


def large(model, std=0.5):
    """Weights large enough that a difference shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(0, std if parameter.ndim > 1 else 0.1).add_(parameter.ndim == 1)
    return model.eval()


def lfm2():
    sizes = SIZES | {"layer_types": ["conv", "full_attention"]}
    return large(Lfm2ForCausalLM(Lfm2Config(**sizes)))


class Running(PreTrainedModel):
    """A user's own trunk: each token reads the mean of all tokens before, wherever their documents begin."""

    config_class = Lfm2Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, **_):
        x = self.embed(input_ids)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return BaseModelOutputWithPast(last_hidden_state=x + x.cumsum(1) / counts)


class RunningLM(PreTrainedModel, GenerationMixin):
    config_class = Lfm2Config
    base_model_prefix = "trunk"
    bends = noisy = False

    def __init__(self, config):
        super().__init__(config)
        self.trunk = Running(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, **options):
        hidden = self.trunk(input_ids, **options).last_hidden_state
        if self.noisy:  # a token's logits depend on how long the row beside it is
            hidden = hidden * (1 + 0.1 * input_ids.shape[1])
        return CausalLMOutputWithPast(logits=self.lm_head(hidden.tanh() if self.bends else hidden))


class BendingLM(RunningLM):
    bends = True


class NoisyLM(RunningLM):
    noisy = True


def of_users_own(kind=RunningLM):
    return large(kind(Lfm2Config(**SIZES | {"layer_types": ["full_attention"] * 2})))


def test_a_model_that_is_right_in_all_arrangements_uses_all_of_them():
    model = tiny("Llama")
    state = torch.get_rng_state()
    found = probe(model)
    assert (found.attention, found.head, found.packed, found.shared, dict(found.notes)) == (
        NAME,
        "linear",
        True,
        True,
        {},
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("make", [lfm2, of_users_own], ids=["LFM2's convolutions", "a user's own class"])
def test_states_that_run_on_into_the_next_document_are_seen_and_rows_are_padded(make):
    """ENG-1: such a model lost up to 6.4 nats a token, by default and without a word."""
    model = make()
    use_rl_fn_attention(model)
    found = probe(model)
    assert (found.packed, found.shared) == (False, False)
    assert "rows are padded" in found.notes["packed"] and type(model).__name__ in found.notes["packed"]


def test_a_frozen_model_is_compared_by_its_numbers_alone():
    model = lfm2().requires_grad_(False)
    assert not probe(model).packed


@pytest.mark.parametrize("arranged", [{}, {"packing": True}])
def test_scores_of_a_hybrid_are_those_of_rows_alone(arranged):
    """ENG-1, by default and packed; the KL of such a model to its copy is 0."""
    model = lfm2()
    rows = [single_turn([5, 6, 7, 8, 9], [3 + row] * (2 + row), group=0) for row in range(3)]
    batch = collate(rows, 0)
    scorer = ready(TokenScorer, model, ScoringConfig(**arranged))
    found = scorer.token_logprobs(batch)
    assert scorer.notes() and all("padded" in note or "own prefix" in note for note in scorer.notes())
    with with_attention(scorer.model, "eager"), torch.no_grad():
        for row, trajectory in enumerate(rows):
            alone = plain_values(scorer.model, torch.tensor(trajectory.tokens))
            torch.testing.assert_close(found[row, 5 : len(alone) + 1], alone[4:], rtol=0, atol=2e-5)


def bert():
    sizes = SIZES | {"is_decoder": True, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return large(BertLMHeadModel(BertConfig(**sizes)))


def recurrent_gemma():
    sizes = SIZES | {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 64, "num_hidden_layers": 3}
    # Its embeddings are multiplied, and its gates make much of what rounding leaves.
    return large(RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes)), std=0.2)


@pytest.mark.parametrize(
    "make, head",
    [(bert, "logits"), (lambda: of_users_own(BendingLM), "logits"), (recurrent_gemma, "linear")],
    ids=["BERT's prediction head", "a user's own head", "RecurrentGemma's cap"],
)
def test_a_head_that_is_more_than_a_matrix_gives_its_own_logits(make, head):
    """ENG-5: BERT was off by 4.8 nats, RecurrentGemma by 2.4."""
    model = make()
    rows = [single_turn([5, 6, 7], [3 + row] * (2 + row), group=row) for row in range(3)]
    scorer = ready(TokenScorer, model, ScoringConfig())
    assert scorer.arrangements.head == head
    found = scorer.token_logprobs(collate(rows, 0))
    with with_attention(scorer.model, "eager"), torch.no_grad():
        for row, trajectory in enumerate(rows):
            alone = plain_values(scorer.model, torch.tensor(trajectory.tokens))
            torch.testing.assert_close(found[row, 3 : len(alone) + 1], alone[2:], rtol=1e-5, atol=3e-5)


def test_a_model_that_is_right_in_no_arrangement_is_refused_by_name():
    with pytest.raises(ValueError, match=r"NoisyLM: padded rows .* cannot be trained here.* differs by"):
        ready(TokenScorer, of_users_own(NoisyLM))


def test_a_class_and_configuration_are_compared_once(monkeypatch):
    model, other = tiny("Llama"), tiny("Llama", num_hidden_layers=3)
    calls = []
    monkeypatch.setattr(probing, "_compared", lambda c, compared=probing._compared: calls.append(c) or compared(c))
    probe(model), probe(model), probe(other), probe(model.requires_grad_(False))
    assert len(calls) == 3


def test_numbers_that_are_all_alike_show_nothing_and_are_not_remembered():
    """A head of zeros gives all tokens one number; a wrong model of its class came later and was taken for right."""
    blank, wrong = (of_users_own(NoisyLM).requires_grad_(False) for _ in range(2))
    with torch.no_grad():
        blank.lm_head.weight.zero_()
    probe(blank)
    with pytest.raises(ValueError, match="NoisyLM: padded rows"):
        probe(wrong)


def test_layers_that_keep_states_are_told_by_the_config_where_the_numbers_show_nothing():
    model = lfm2().requires_grad_(False)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    found = probe(model)
    assert not found.packed and not found.shared and "too rough" in found.notes["packed"]
    assert not probe(lfm2().bfloat16(), exact=False).packed


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_right_model_in_bfloat16_uses_all_arrangements(name):
    """SmolLM2's rounding is in test_smollm2: with bounds that tiny models suggest it was taken for wrong."""
    found = probe(large(tiny(name), std=0.2).bfloat16(), exact=False)
    assert (found.attention, found.packed, found.shared, dict(found.notes)) == (NAME, True, True, {})


def test_in_bfloat16_gross_errors_are_seen():
    assert probe(bert().bfloat16(), exact=False).head == "logits"
    with pytest.raises(ValueError, match="NoisyLM: padded rows"):
        probe(of_users_own(NoisyLM).bfloat16(), exact=False)


def faulty(model, fault):
    """Our attention's log-probabilities as they are, and gradients of some parameters missing or doubled."""

    def hook(gradient):
        ours = probing.attention_of(model) == NAME
        return gradient if not ours else torch.zeros_like(gradient) if fault == "missing" else 2 * gradient

    return hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fault", "where"), [("missing", "layers.2.mlp.up_proj"), ("doubled", "input_layernorm")])
def test_gradients_that_are_missing_in_a_layer_or_doubled_in_all_are_seen(dtype, fault, where):
    """Of single layers rounding says little in bfloat16: SmolLM2 was refused on a processor with AMX."""
    model = large(tiny("Llama", num_hidden_layers=5), std=0.2).to(dtype)
    use_rl_fn_attention(model)
    assert probe(model, exact=dtype == torch.float32).attention == NAME
    probing._cached.clear()
    for name, parameter in model.named_parameters():
        if where in name:
            parameter.register_hook(faulty(model, fault))
    found = probe(model, exact=dtype == torch.float32)
    assert found.attention == "eager" and "gradient" in found.notes["padded"]


def test_a_worker_that_knows_the_class_compares_beside_one_that_does_not(tmp_path):
    """One of two ranks had compared the class before, with others: the second compared alone and waited for ever."""
    ranks = found_by_ranks(_known_on_one_rank, 2, tmp_path)
    assert [found for _, found in ranks] == [{"compared": 2, "alike": True}] * 2


def _known_on_one_rank(number, address, queue):
    def work():
        calls, compared = [], probing._compared
        probing._compared = lambda comparison: calls.append(comparison) or compared(comparison)
        mesh = one_step.mesh_of(one_step.host_of_rank(), (1, 2, 1, 1))
        model = tiny("Llama").requires_grad_(False)
        found = [probe(model, mesh)]
        if number == 0:
            probing._cached.clear()
        found += [probe(model, mesh), probe(model, mesh)]
        return {"compared": len(calls), "alike": found[0] == found[1] == found[2]}

    as_rank(work, 2, number, address, queue)


def classifier():
    return large(LlamaForSequenceClassification(tiny("Llama").config.__class__(**SIZES, num_labels=1, pad_token_id=60)))


def test_a_classifier_is_compared_with_its_own_pooled_number():
    model = classifier()
    use_rl_fn_attention(model)
    assert probe(model).shared
    model.forward = lambda *a, forward=model.forward, **k: _shifted(forward(*a, **k))
    probing._cached.clear()
    with pytest.raises(ValueError, match="scores a row of 9 tokens"):
        probe(model)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_classifier_s_own_number_is_compared_by_the_spread_of_all_however_large_they_are(scale):
    """A thousandth of the spread is rounding, all of it is another number."""
    model, row = classifier(), torch.arange(9)
    model.score.weight.data *= scale
    values = plain_values(model, row)
    spread, forward = float(values.detach().std()), model.forward
    model.forward = lambda *a, **k: _shifted(forward(*a, **k), 1e-3 * spread)
    assert torch.equal(plain_values(model, row), values)
    model.forward = lambda *a, **k: _shifted(forward(*a, **k), spread)
    with pytest.raises(ValueError, match="scores a row of 9 tokens"):
        plain_values(model, row)


def _shifted(output, shift=1.0):
    output.logits = output.logits + shift
    return output


def test_a_llama_without_its_attention_is_told_by_the_plan():
    class Deaf(LlamaForCausalLM):
        def set_attn_implementation(self, name, **_):
            super().set_attn_implementation("sdpa" if name == NAME else name)

    model = Deaf(tiny("Llama").config)
    large(model).config._attn_implementation = "sdpa"
    assert not probe(model).packed


def test_convolutions_that_are_told_where_documents_begin_are_packed(monkeypatch):
    """transformers' kernels for GPUs read ``seq_idx``; its convolution for CPUs does not."""

    def apart(hidden_states, weight, bias=None, activation=None, seq_idx=None, **_):
        assert activation is None
        if seq_idx is None:
            return plain(hidden_states, weight, bias)
        edges = [0, *((seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1).tolist(), seq_idx.shape[1]]
        parts = [hidden_states[:, :, a:b] for a, b in itertools.pairwise(edges)]
        return torch.cat([plain(part, weight, bias) for part in parts], 2)

    plain = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", apart)
    model = lfm2()
    use_rl_fn_attention(model)
    found = probe(model)
    assert found.packed and not found.shared
