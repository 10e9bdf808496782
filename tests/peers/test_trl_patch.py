"""A real GRPO step of TRL's, patched and unpatched: the same loss and gradients, less memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # TRL's and transformers' own warnings
trl = pytest.importorskip("trl")

from rl_bridge.integrations import trl as integration  # noqa: E402
from rl_bridge.models.pretrained import new_for_rows  # noqa: E402


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    size = storage.nbytes()
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, size)
        return result

    def _freed(self, size):
        self.now -= size


@pytest.fixture
def trainer(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    source, tokenizer = new_for_rows(rows, seed=0)
    model = source.whole()
    # A vocabulary that is large beside the rest, as real ones are.
    model.resize_token_embeddings(20000)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.1)
    model.config._name_or_path = str(tmp_path / "model")  # the trainer reads the configuration again by name
    model.save_pretrained(tmp_path / "model")
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        beta=0.1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        temperature=0.9,
    )
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(c) % 3) for c in completions],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
    )


@pytest.fixture(autouse=True)
def restored():
    yield
    integration.unpatch()


def step(trainer, inputs):
    trainer.model.zero_grad()
    with LiveBytes() as memory:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    return loss.item(), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None], memory.most


def test_loss_and_gradients_of_a_grpo_step(trainer):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # what its training loop sets
    torch.manual_seed(0)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    inputs["advantages"] = torch.linspace(-1.0, 1.0, len(inputs["advantages"]))
    loss, gradients, memory = step(trainer, inputs)
    integration.patch()
    patched_loss, patched_gradients, patched_memory = step(trainer, inputs)
    assert patched_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert any(bool(g.any()) for g in gradients)
    for a, b in zip(patched_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    print(f"peak of live tensors in the step: {memory / 2**20:.1f} MiB unpatched, {patched_memory / 2**20:.1f} patched")
    assert patched_memory < 0.5 * memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_logits(dtype):
    import trl.trainer.utils as utils

    logits = torch.randn(3, 5, 101, dtype=dtype, generator=torch.Generator().manual_seed(0))
    index = torch.randint(101, (3, 5), generator=torch.Generator().manual_seed(1))

    def everything():
        leaf = logits.clone().requires_grad_()
        one = utils.selective_log_softmax(leaf, index)
        logprobs, entropy = utils.selective_log_softmax_and_entropy(leaf, index, temperature=0.7)
        (one + logprobs - 0.1 * entropy + utils.entropy_from_logits(leaf)).sum().backward()
        return one.detach(), logprobs.detach(), entropy.detach(), leaf.grad

    theirs = everything()
    integration.patch()
    for a, b in zip(everything(), theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
