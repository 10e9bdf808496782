"""A class of one's own gives logits, the same for the same row: whatever else it gives is refused by its cause."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from rl_bridge.common.random_numbers import generators
from rl_bridge.models.own_model import own_source
from tests.support import own_models as own

STARTS = ("own", "zero", "small")
AGAIN = "gives other logits for the same row when it is called again.*: "
RANDOM = AGAIN + "it keeps something from call to call, or draws random numbers in evaluation"
BUFFER = AGAIN + "calls change its buffer '{}', which training alone may do"
GRADIENTS = "gives other logits where gradients are computed than under torch.no_grad"
PROBABILITIES = "gives what look like probabilities.*returns logits, before the softmax"


class AlwaysDropped(own.Untied):
    def mixed(self, x):
        return dropout(x, 0.1)


class Noisy(own.Untied):
    def mixed(self, x):
        return x + 0.1 * torch.randn_like(x)


class Counting(own.Untied):
    """Its numbers grow from call to call, by what no buffer holds."""

    calls = 0

    def mixed(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Drifting(own.Untied):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def mixed(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x - self.mean


class InPlaceOf(own.Untied):
    """A buffer that each call replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.ones(()), persistent=False)

    def mixed(self, x):
        self.share = self.share * 0.99
        return x * self.share


class OnlyLearning(own.Untied):
    def mixed(self, x):
        return 1.1 * x if torch.is_grad_enabled() else x


class OnlyLearned(own.Untied):
    def mixed(self, x):
        return 1.1 * x if x.requires_grad else x


class Probable(own.Untied):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return super().forward(input_ids, position_ids, attention_mask).softmax(-1)


class Sharp(own.Untied):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return (100 * super().forward(input_ids, position_ids, attention_mask)).softmax(-1)


class LogProbable(own.Untied):
    """Right: the softmax of log-probabilities is that of the logits."""

    def forward(self, input_ids, position_ids, attention_mask=None):
        return super().forward(input_ids, position_ids, attention_mask).log_softmax(-1)


class Positive(own.Untied):
    """Right, if odd: no number is below 0, and their sums are any."""

    def forward(self, input_ids, position_ids, attention_mask=None):
        return super().forward(input_ids, position_ids, attention_mask).exp()


class Counted(own.Untied):
    """Right: a count that no number reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def mixed(self, x):
        self.calls += 1
        return x


class Rounded(own.Untied):
    def forward(self, input_ids, position_ids, attention_mask=None):
        return super().forward(input_ids, position_ids, attention_mask).bfloat16().softmax(-1)


class Padded(own.Untied):
    """Right: two tokens that pad its vocabulary are never drawn."""

    def forward(self, input_ids, position_ids, attention_mask=None):
        logits = super().forward(input_ids, position_ids, attention_mask)
        return logits.masked_fill(torch.arange(logits.shape[-1]) >= logits.shape[-1] - 2, -torch.inf)


class PaddedAndDropped(Padded):
    def mixed(self, x):
        return dropout(x, 0.1)


class PaddedAtRandom(own.Untied):
    def forward(self, input_ids, position_ids, attention_mask=None):
        logits = super().forward(input_ids, position_ids, attention_mask)
        return logits.masked_fill(torch.rand_like(logits) < 0.3, -torch.inf)


FAULTS = {
    AlwaysDropped: RANDOM,
    PaddedAndDropped: RANDOM,
    PaddedAtRandom: RANDOM,
    Rounded: PROBABILITIES,
    Noisy: RANDOM,
    Counting: RANDOM,
    Drifting: BUFFER.format("mean"),
    InPlaceOf: BUFFER.format("share"),
    OnlyLearning: GRADIENTS,
    OnlyLearned: GRADIENTS,
    Probable: PROBABILITIES,
    Sharp: PROBABILITIES,
}
RIGHT = (own.Untied, own.Tiny, own.Bigram, own.RunningMean, own.Overflowing, LogProbable, Positive, Counted, Padded)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_class_without_steady_logits_is_refused_by_the_cause_whatever_it_starts_with(kind, start):
    """With dropout always on it was refused with words about masks and padding; probabilities were trained on."""
    with pytest.raises(ValueError, match=f"^{kind.__name__} {FAULTS[kind]}"):
        own_source(own.started(kind, start), own.tokenizer())


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_class_of_steady_logits_is_taken_and_the_program_s_random_numbers_stay(kind):
    before = generators()
    assert own_source(kind, own.tokenizer()).name == kind.__name__
    assert torch.equal(generators().torch, before.torch) and generators().python == before.python


class OfFourTokens(own.Bigram):
    """It has few positions."""

    max_positions = 4

    def forward(self, input_ids, position_ids, attention_mask=None):
        if input_ids.shape[1] > 4:
            raise IndexError("too long")
        return super().forward(input_ids, position_ids).softmax(-1)


class OfAnotherDevice(own.Bigram):
    def forward(self, input_ids, position_ids, attention_mask=None):
        if not input_ids.is_meta:
            raise RuntimeError("needs its device")
        return super().forward(input_ids, position_ids)


def test_a_row_is_no_longer_than_the_class_reads_and_code_that_fails_here_is_not_judged():
    with pytest.raises(ValueError, match=PROBABILITIES):
        own_source(OfFourTokens, own.tokenizer())
    assert own_source(OfAnotherDevice, own.tokenizer()).vocabulary == own.TOKENS


def test_a_class_is_tried_on_the_cpu_whatever_device_is_the_default():
    """Ids of the meta device have no values: right classes were refused for what lay in memory, wrong ones taken."""
    with torch.device("meta"):
        assert own_source(functools.partial(own.Untied), own.tokenizer())
        with pytest.raises(ValueError, match=PROBABILITIES):
            own_source(functools.partial(Probable), own.tokenizer())


def test_a_partial_is_named_by_its_class():
    class Wide(nn.Embedding):
        def forward(self, input_ids, position_ids, attention_mask=None):
            return super().forward(input_ids).softmax(-1)

    with pytest.raises(ValueError, match=r"^Wide gives what look like"):
        own_source(functools.partial(Wide, 20, 20), own.tokenizer())


def test_a_class_begins_with_the_tensors_of_the_program_and_leaves_them_as_they_are():
    """Engines wrote into a table that the class reads: policy and reference were one, and both began at random."""
    table = torch.randn(own.TOKENS, own.TOKENS)

    class OfATable(own.Bigram):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(table, freeze=False)

    before = table.clone()
    source = own_source(OfATable, own.tokenizer())
    policy, reference = (source.empty() for _ in range(2))
    for model in (policy, reference):
        source.load(model)
    with torch.no_grad():
        policy.own.table.weight.zero_()
    assert torch.equal(reference.own.table.weight, before) and torch.equal(table, before)


def test_a_function_that_gives_its_module_again_is_refused_and_one_that_copies_it_is_taken():
    module = own.Untied()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    assert own_source(lambda: copy.deepcopy(module), own.tokenizer())
    with pytest.raises(ValueError, match=r"gives the parameter '.*' that it gave before: .*copy\.deepcopy it"):
        own_source(lambda: module, own.tokenizer())
    layer = nn.Embedding(own.TOKENS, own.TOKENS)

    class Sharing(own.Bigram):
        def __init__(self):
            super().__init__()
            self.table = layer

    with pytest.raises(ValueError, match=r"^Sharing gives the parameter 'table\.weight' that it gave before"):
        own_source(Sharing, own.tokenizer())
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
