"""A pad token with which no row ends (USR-3, MUS-1, MUSA-3): which one a tokenizer gets, and where a score is read."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.model_source import PretrainedValueSource, StateSource, ValueSource
from rl_bridge.models.row_checks import pad_with_no_end
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.value import ValueScorer
from rl_bridge.parallel.heads import scored_places
from tests.support.chat_templates import bytes_tokenizer

END = "<|im_end|>"


def chatml(pad=None, **special):
    """Ends with <|im_end|>, uses <|im_start|>; three special tokens are of no use to its template."""
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.add_special_tokens({name: token for name, token in special.items() if token})
    if pad is not None:
        tokenizer.pad_token = pad
    return tokenizer


def rows_of(tokenizer):
    eos = tokenizer.eos_token_id
    return [[*tokenizer("1+1?").input_ids, eos, *tokenizer("\n").input_ids], [*tokenizer("<start>").input_ids, eos]]


def padded_with(tokenizer, spare=0, rows=None):
    source = TinySource(vocabulary=len(tokenizer) + spare, hidden=8, heads=1, layers=1)
    number = pad_with_no_end(tokenizer, source, rows_of(tokenizer) if rows is None else rows)
    assert number == tokenizer.pad_token_id < len(tokenizer) <= source.vocabulary
    assert tokenizer(["1", "1010"], padding=True).input_ids[0][-1] == number
    return tokenizer.pad_token


def test_a_pad_token_of_its_own_stays():
    assert padded_with(chatml("<start_of_turn>"), spare=5) == "<start_of_turn>"


def test_one_that_ends_rows_makes_place_for_the_best_that_there_is():
    assert padded_with(chatml(END, additional_special_tokens=["<|my_pad|>"]), spare=5) == "<|my_pad|>"
    assert padded_with(chatml(END), spare=5) == "<|pad|>"
    assert padded_with(chatml(END)) == "<start_of_turn>"
    reserved = chatml(END, additional_special_tokens=["<|reserved_3|>"])
    assert padded_with(reserved) == "<|reserved_3|>"
    used = [special for special in chatml().all_special_ids if special != chatml().eos_token_id]
    rows = [[*used, chatml().eos_token_id]]
    assert padded_with(chatml(END, unk_token="<start_of_turn>"), rows=rows) == "<start_of_turn>"
    bos = bytes_tokenizer("roles")
    bos.pad_token = bos.eos_token
    every = [special for special in bos.all_special_ids if special != bos.eos_token_id]
    assert padded_with(bos, rows=[[*every, 5]]) == "<bos>"


def test_the_character_tokenizer_s_token_for_padding_is_found_again():
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.pad_token = tokenizer.eos_token
    assert padded_with(tokenizer, rows=[[3, 4, 1]]) == "<pad>"
    assert tokenizer.pad_token_id == 0


def test_without_one_the_way_on_is_named():
    tokenizer = character_tokenizer("01")
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(ValueError, match=r"pads with '<eos>', with which rows end, .*resize_token_embeddings"):
        padded_with(tokenizer, rows=[[3, 1], [3, 0]])


@pytest.mark.parametrize(
    ("pad", "wanted"), [(None, [3, 1, 4, 0]), (9, [3, 1, 4, 0]), (7, [2, 1, 4, 0]), (5, [3, 0, 3, 0])]
)
def test_a_score_is_read_at_the_last_token_that_is_no_padding(pad, wanted):
    """Padding of the batch is 0 here: whatever a batch is filled with is not read."""
    ids = torch.tensor([[5, 6, 5, 7, 0], [6, 5, 0, 0, 0], [5, 7, 7, 6, 5], [5, 0, 0, 0, 0]])
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=pad))
    model = SimpleNamespace(config=config)
    assert scored_places(model, ids, torch.tensor([4, 2, 5, 1])).tolist() == wanted


@pytest.mark.parametrize("pad", [0, 1, 4, None], ids=["no row's", "the end", "inside rows", "none"])
@pytest.mark.parametrize("own", [True, False], ids=["trained here", "from elsewhere"])
def test_one_number_for_one_row_here_and_in_transformers(pad, own, tmp_path):
    """Alone, and in a batch that is filled with the model's own padding: also where the pad token ends the rows."""
    rows = [[2, 3, 4, 5, 1], [6, 1], [4, 4, 7, 1], [7, 4]]
    if own:
        base = TinySource(vocabulary=8, hidden=16, heads=2, layers=2, seed=3)
        source = ValueSource(StateSource(base.whole()), seed=1, pad_token=pad)
        with torch.device("meta"):
            assert source.empty().config.pad_token_id == pad
        module = torch_worker(lambda: ValueScorer(source), None, torch.device("cpu"), generators())
        module.save_pretrained(str(tmp_path))
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=8, num_labels=1, pad_token_id=pad, initializer_range=0.5, **sizes)
        LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        alone = torch.cat([theirs(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    assert len(set(alone.tolist())) == len(rows)
    batch = collate([single_turn(row[:1], row[1:]) for row in rows], 0 if pad is None else pad)
    if pad is not None:
        inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        with torch.no_grad():
            together = theirs(input_ids=batch.tokens, attention_mask=inside.long()).logits[:, 0]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    read = PretrainedValueSource(str(tmp_path))
    for scoring in (ScoringConfig(share_prefixes=False), ScoringConfig(packing=True), ScoringConfig()):
        scorer = torch_worker(
            lambda scoring=scoring: ValueScorer(read, scoring), None, torch.device("cpu"), generators()
        )
        torch.testing.assert_close(scorer.scores(batch), alone, rtol=0, atol=1e-5)


def test_the_tokenizer_is_not_changed_by_looking(tmp_path):
    tokenizer = chatml("<start_of_turn>")
    before = copy.deepcopy(tokenizer)
    padded_with(tokenizer, spare=5)
    assert len(tokenizer) == len(before) and tokenizer.pad_token == before.pad_token
