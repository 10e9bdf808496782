"""Parameters chosen by their names are not trained, and nothing else changes."""

import pytest
import torch

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import FreezingSource
from rl_bridge.models.small import TinySource
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig

BASE = TinySource(vocabulary=15, hidden=16, layers=2, heads=2, seed=3)
BATCH = collate([single_turn([2, 3, 4], [4, 5, 1]), single_turn([6], [7, 1])], 0)


def frozen_names(source):
    with torch.device("meta"):
        return {name for name, p in source.empty().named_parameters() if not p.requires_grad}


def test_patterns_choose_by_name():
    names = {name for name, _ in BASE.empty().named_parameters()}
    assert frozen_names(FreezingSource(BASE, ("*.layers.0.*",))) == {n for n in names if ".layers.0." in n}
    assert frozen_names(FreezingSource(BASE, ("model.norm.weight", "*.layers.[01].mlp.*"))) == {
        name for name in names if ".mlp." in name or name == "model.norm.weight"
    }
    # Tied embeddings are one tensor under two names.
    assert frozen_names(FreezingSource(BASE, ("lm_head.*",))) == {"model.embed_tokens.weight"}


def test_with_adapters_names_are_those_without_peft():
    pytest.importorskip("peft")
    adapted = LoRASource(BASE, 2, 4.0)
    found = frozen_names(FreezingSource(adapted, ("model.layers.0.*",))) - frozen_names(adapted)
    assert found and all(".layers.0." in name and ".lora_" in name for name in found)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.norm.weigth",), r"'model\.norm\.weigth' matches no parameter .* near names are model\.norm\.weight"),
        (("*.layers.7.*",), r"'\*\.layers\.7\.\*' matches no parameter of the model; near names are model\.layers\."),
        (("zzz",), r"'zzz' matches no parameter of the model; the first is "),
        (("*",), r"freeze patterns '\*' leave no parameter to train"),
    ],
)
def test_patterns_that_say_nothing_or_everything_are_refused(patterns, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        FreezingSource(BASE, patterns).empty()


def test_what_is_frozen_stays_bit_for_bit():
    source = FreezingSource(BASE, ("*.layers.0.*", "model.norm.*"))
    make = lambda: SupervisedModule(source, OptimizerConfig(learning_rate=1e-2, warmup=0), updates=4)  # noqa: E731
    module = torch_worker(make, None, torch.device("cpu"), generators())
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    for _ in range(2):
        module.train_step(BATCH, 5.0)
        module.optimizer_step()
    same = {name for name, p in module.model.named_parameters() if torch.equal(p, before[name])}
    assert same == frozen_names(source)
    assert len(module.checkpoint_state()["optimizer"]["state"]) == len(before) - len(same)
