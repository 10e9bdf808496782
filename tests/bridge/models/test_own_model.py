"""A model class of the user's own: compared once, trained as any other, and what it lacks is named."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import FreezingSource, ValueSource
from rl_bridge.models.own_class import factory_of, vocabulary_of
from rl_bridge.models.own_model import mask_of, own_source
from rl_bridge.models.pretrained import load_pretrained, tokenizer_of
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.parallel import probe as probing
from rl_bridge.parallel.attention import AttentionPlan
from rl_bridge.parallel.attention.plan import segments_of
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.weights import ModuleReceiver
from tests.support.own_models import TOKENS, Bigram, BothWays, NoMask, NoPositions, RunningMean, Tiny, tokenizer

ROWS = [[2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 9, 1], [10, 11, 2]]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(probing, "_cached", {})


def scorer(factory, wrap=lambda source: source, parallel=None, **options):
    source, scoring = wrap(own_source(factory, tokenizer(), seed=1)), ScoringConfig(**options)
    kind = functools.partial(TokenScorer, source, scoring, parallel=parallel)
    return torch_worker(kind, None, torch.device("cpu"), generators())


def scores(module, rows=ROWS):
    """Log-probabilities of the tokens after the first, as the module scores rows of one group."""
    batch = collate([single_turn(row[:1], row[1:], group=number // 2) for number, row in enumerate(rows)], 0)
    values = module.token_logprobs(batch)
    return torch.cat([row[1 : len(tokens)] for row, tokens in zip(values, rows, strict=True)])


def alone(factory, rows=ROWS):
    """The same of the class itself, without any of this library."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        module = factory().eval()
        values = []
        for row in rows:
            ids = torch.tensor([row])
            logits = module(ids, torch.arange(len(row))[None])[0, :-1].log_softmax(-1)
            values.append(logits.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(values)


@pytest.mark.parametrize(
    ("factory", "packs"),
    [
        *((Tiny, True), (Bigram, True), (functools.partial(Tiny, layers=1), True)),
        *((NoMask, False), (NoPositions, False), (RunningMean, False)),
    ],
    ids=str,
)
def test_rows_have_the_numbers_of_the_class_alone_however_they_are_to_lie(factory, packs):
    for options in ({"share_prefixes": False}, {"share_prefixes": False, "packing": True}, {"packing": True}):
        module = scorer(factory, **options)
        torch.testing.assert_close(scores(module), alone(factory), rtol=1e-5, atol=1e-5)
        assert module.arrangements.packed == packs
        notes = " ".join(module.notes())
        assert "gives logits and no hidden states" in notes
        assert ("rows are padded, since packed rows would give other numbers" in notes) == (
            options.get("packing", False) and not packs
        )


def test_a_class_without_attention_keeps_the_rows_of_a_group_apart():
    assert not scorer(RunningMean).arrangements.shared and scorer(Tiny).arrangements.shared


def test_a_class_whose_padded_rows_are_wrong_is_refused_by_name():
    with pytest.raises(ValueError, match=r"BothWays: padded rows do not give .* nothing of other rows"):
        scorer(BothWays)


def test_a_class_that_is_defined_anew_is_compared_anew():
    def of(reads):
        return type("Again", (Tiny,), {"reads_mask": reads})

    assert [scorer(of(reads)).arrangements.packed for reads in (True, False)] == [True, False]


def test_a_mask_says_what_the_plan_says():
    plan = AttentionPlan(segments_of([3, 2, 2, 2], [None, 0, 0, 2]), torch.device("cpu"))
    rows = ["".join("x" if sees else "." for sees in row) for row in mask_of(plan, 9)[0, 0].tolist()]
    assert rows == [
        *("x........", "xx.......", "xxx......"),
        *("xxxx.....", "xxxxx...."),
        *("xxx..x...", "xxx..xx.."),
        *("xxx..xxx.", "xxx..xxxx"),
    ]


class Hasty(nn.Module):
    """A class whose beginning was forgotten."""

    def __init__(self):
        self.embed = nn.Embedding(TOKENS, 4)


class NoForward(nn.Linear):
    forward = nn.Module.forward


class ByOtherNames(Bigram):
    def forward(self, ids, position_ids):
        return self.table(ids)


class Hidden(Bigram):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.table(input_ids), None


class Last(Bigram):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.table(input_ids)[:, -1]


class Raises(Bigram):
    def forward(self, input_ids, position_ids, attention_mask=None):
        raise KeyError("cache")


class Loose(Bigram):
    def __init__(self):
        super().__init__()
        self.bias = torch.ones(TOKENS)


class Orthogonal(Bigram):
    def __init__(self):
        super().__init__()
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


class Empty(nn.Module):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return input_ids.float()


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (3, TypeError, "makes a torch.nn.Module when it is called, got 3"),
        (lambda: 3, TypeError, "makes a torch.nn.Module, got int"),
        (
            nn.Linear,
            TypeError,
            r"Linear is made without arguments, and needs in_features, out_features: give functools",
        ),
        (functools.partial(NoForward, 2, 2), TypeError, r"NoForward lacks forward: .*input_ids, position_ids"),
        (Bigram(), TypeError, "Bigram is a module that is made: give its class"),
        (Hasty, TypeError, r"Hasty\.__init__ begins with super\(\)\.__init__\(\): cannot assign module before"),
        (ByOtherNames, TypeError, r"ByOtherNames\.forward lacks input_ids, attention_mask: a model of your own has"),
        (Hidden, ValueError, r"Hidden\.forward returns logits, a tensor \[N, T, V\], got tuple"),
        (Last, ValueError, rf"Last\.forward .*: for ids \[1, 2\] it gave float32 \[1, {TOKENS}\]"),
        (Raises, ValueError, "Raises cannot read a row of two tokens .*: KeyError: 'cache'"),
        (Loose, ValueError, r"Loose has a tensor 'bias' that is no buffer.*register_buffer\('bias'"),
        (Empty, ValueError, "Empty has no parameter"),
        (Orthogonal, ValueError, "Orthogonal cannot be made on the meta device"),
    ],
)
def test_what_a_class_lacks_is_named(factory, error, words):
    with pytest.raises(error, match=words):
        own_source(factory, tokenizer())


def test_logits_that_are_fewer_than_the_tokens_are_refused():
    with pytest.raises(ValueError, match=f"<lambda> gives 4 logits a token, and the tokenizer has {TOKENS} tokens"):
        own_source(lambda: Table(4), tokenizer())


class Table(Bigram):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(size, size)


def test_code_that_reads_values_is_tried_on_the_cpu():
    class Reads(Bigram):
        def forward(self, input_ids, position_ids, attention_mask=None):
            return self.table(input_ids) * (1.0 if int(input_ids[0, 0]) >= 0 else 2.0)

    assert vocabulary_of(Reads) == TOKENS


def test_weights_are_read_under_the_class_s_own_names(tmp_path):
    weights = {name: tensor.clone() for name, tensor in Tiny().state_dict().items()}
    save_file(weights, tmp_path / "tiny.safetensors")
    source = own_source(Tiny, tokenizer(), weights=tmp_path / "tiny.safetensors")
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    assert model.state_dict().keys() == weights.keys() == dict(model.own.state_dict()).keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert torch.equal(model.own.places, Tiny().places) and not model.own.training
    weights["layers.0.out.weight"] = weights["layers.0.out.weight"][:3]
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: 'layers\.0\.out\.weight': the model's shape is"):
        own_source(Tiny, tokenizer(), weights=tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"do not fit Bigram: 1 are not stored \(the first: \['table\.weight'\]\)"):
        own_source(Bigram, tokenizer(), weights=tmp_path / "tiny.safetensors")
    with pytest.raises(FileNotFoundError, match="absent"):
        own_source(Bigram, tokenizer(), weights=tmp_path / "absent.safetensors")


def test_a_saved_model_is_loaded_by_its_class_and_refused_without(tmp_path):
    module = scorer(Tiny)
    folder = tmp_path / "model"
    folder.mkdir()
    module.save_pretrained(str(folder))
    tokenizer().save_pretrained(str(folder))
    assert load_file(folder / "model.safetensors").keys() == Tiny().state_dict().keys()
    assert json.loads((folder / "own_model.json").read_text())["class"] == "Tiny"
    source = own_source(Tiny, tokenizer_of(str(folder), alone=True), weights=folder)
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), module.model.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"weights of a class of your own, Tiny, .* load_model\(Tiny, tokenizer=…"):
        load_pretrained(str(folder))


def test_a_class_of_a_file(tmp_path):
    text = "from tests.support.own_models import Bigram\n\n\ndef small():\n    return Bigram()\n"
    (tmp_path / "models.py").write_text(text)
    source = own_source(factory_of(f"{tmp_path / 'models.py'}:small"), tokenizer())
    assert source.name == "small" and source.vocabulary == TOKENS
    with pytest.raises(ValueError, match="has no class or function 'large'"):
        factory_of(f"{tmp_path / 'models.py'}:large")
    with pytest.raises(FileNotFoundError, match="no such model file"):
        factory_of(str(tmp_path / "absent.py") + ":small")


def test_frozen_parameters_and_adapters_go_by_the_class_s_names(tmp_path):
    frozen = FreezingSource(own_source(Tiny, tokenizer()), ("tokens.*",)).empty()
    assert [name for name, p in frozen.named_parameters() if not p.requires_grad] == ["tokens.weight"]
    module = scorer(Tiny, lambda source: LoRASource(source, 2, 4.0, ["qkv"]), packing=True)
    torch.testing.assert_close(scores(module), alone(Tiny), rtol=1e-5, atol=1e-5)
    module.save_pretrained(str(tmp_path))  # merged
    assert load_file(tmp_path / "model.safetensors").keys() == Tiny().state_dict().keys()
    with pytest.raises(ValueError, match=r"the LoRA target 'tokens': Tiny reads its weight itself"):
        LoRASource(own_source(Tiny, tokenizer()), 2, 4.0, ["tokens"]).empty()
    with pytest.raises(ValueError, match=r"Tiny is a class of your own.*name target_modules"):
        LoRASource(own_source(Tiny, tokenizer()), 2, 4.0).empty()


def test_a_sharded_model_and_a_sync_reach_the_class_s_module():
    module = scorer(Tiny, parallel=ParallelConfig(cpu_offload=True))
    torch.testing.assert_close(scores(module), alone(Tiny), rtol=1e-5, atol=1e-5)
    plain = scorer(Tiny)
    receiver: ModuleReceiver = plain.weight_receiver()
    assert receiver is not None
    with torch.no_grad():
        plain.exported().get_parameter("tokens.weight").zero_()
    assert not plain.model.own.tokens.weight.any()


def test_where_a_folder_is_read_a_class_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'tiny\.py:Tiny': it is a class of your own"):
        load_pretrained("tiny.py:Tiny")


def test_a_critic_of_a_class_is_refused_by_name():
    with pytest.raises(ValueError, match="Tiny is a class of your own, which gives logits: a value model reads hidden"):
        ValueSource(own_source(Tiny, tokenizer())).empty()
