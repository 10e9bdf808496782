"""LoRA: a frozen base model from any source, and small adapters that are trained in its place."""

import json
import math
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_bridge.models.lora_targets import ALL_LINEAR, Targets, targets_of
from rl_bridge.models.model_folder import ADAPTER
from rl_bridge.models.model_source import HEAD, ModelSource, made_on
from rl_bridge.models.stored_tensors import SafetensorsFolder, require_finite
from rl_bridge.parallel.fsdp import part_of
from rl_bridge.parallel.heads import is_language_model
from rl_bridge.weights.manifest import local

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_ADAPTER = "default"
_FACTOR = re.compile(rf"\.lora_(embedding_)?[AB]\.{_ADAPTER}(?=\.|$)")
_FILE = "adapter_model.safetensors"
_PATCHING = threading.Lock()
_OPTIONS = ("r", "lora_alpha", "use_rslora")
"""Fields that a source of LoRA sets."""


@dataclass(frozen=True)
class LoRASource:
    """A peft model around the model of ``source``: W + scaling · B A, with W frozen and A, B trainable in float32.

    scaling is alpha / rank, or alpha / √rank with ``use_rslora``. B starts at zero (of embeddings A), so that the model
    begins as its base. Its weights travel merged, or as an adapter with ``sync_weights(..., adapter=True)``.

    The head of a value model without an adapter is trained itself, since it may begin at zero: it travels merged alone.
    """

    source: ModelSource
    """The base model."""
    rank: int
    alpha: float
    target_modules: str | Sequence[str] = ALL_LINEAR
    """Ends of the names of modules, and of weights with their module's name: "q_proj", "experts.down_proj".

    "all-linear" is every linear layer but the output embeddings, what chooses or weighs the experts of a mixture, and
    layers whose weight the model's code reads itself. Experts that lie in one stack are no layers: they are named.
    """
    use_rslora: bool = False
    adapter: str | None = None
    """Folder in peft's format that A and B are read from. None draws A from ``seed``, the same on every layout."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse adapters without effect."""
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"need rank ≥ 1 and alpha > 0, got rank={self.rank}, alpha={self.alpha}")

    def empty(self) -> "PeftModel":  # type: ignore[override]
        """The peft model, in evaluation mode.

        Raises:
            ImportError: peft is not installed.
            ValueError: the base model has no such targets, or an adapter there would not act as it will merged.
        """
        peft, base = _peft(), self.source.empty()
        targets = targets_of(base, self.target_modules)
        if self.rank > (widest := targets.widest(base)):
            raise ValueError(
                f"a LoRA rank of {self.rank} is more than any targeted layer is wide, of which the widest has "
                f"{widest}: give a smaller rank, or train the whole model without one"
            )
        config = self._config(base, targets)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _targets_as_they_are():
            # peft asks transformers under the property's old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # peft corrects the option for each layer that it adapts, where a model has both kinds.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
            model = peft.get_peft_model(base, config, adapter_name=_ADAPTER)
        tuner = model.base_model
        adapted = {*tuner.targeted_module_names, *tuner.targeted_parameter_names}
        if adapted != {*targets.modules, *targets.parameters}:
            raise ValueError(f"peft adapted other weights than those asked for: {adapted} for {targets}")
        head = getattr(base, HEAD, None)
        if not is_language_model(base) and isinstance(head, torch.nn.Linear):  # with an adapter it is another layer
            head.requires_grad_(True)
        return model.eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Load the base as its own source does, then read or draw the adapters; each worker keeps its part.

        Raises:
            ValueError: as the base's source does; or the folder ``adapter`` holds another kind of adapter.
        """
        device = made_on(model, device)
        with _without_adapters(model) as base:
            self.source.load(base, device)
        names = {name: p for name, p in model.named_parameters() if _FACTOR.search(name)}
        values = self._initial_values(names) if self.adapter is None else self._stored(model, names)
        with torch.no_grad():
            for name, value in values:
                local(names[name]).copy_(value)

    def _config(self, base: PreTrainedModel, targets: Targets) -> "LoraConfig":
        modules = dict(base.named_modules())
        return _peft().LoraConfig(
            # peft asks a model of this kind how it generates, which a value model does not.
            task_type="CAUSAL_LM" if base.can_generate() else None,
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=targets.modules,
            target_parameters=targets.parameters or None,
            use_rslora=self.use_rslora,
            # GPT-2's layers hold their weights as [inputs, outputs].
            fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in targets.modules),
        )

    def _initial_values(self, names: dict[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """peft's own start, one factor zero; the others are drawn whole, in the order of the names.

        A is uniform in ±1/√inputs and B zero; of embeddings A is zero and B normal.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in names.items():
            whole = torch.zeros(parameter.shape, device="cpu")
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            if ".lora_embedding_B." in name:
                torch.nn.init.normal_(whole, generator=generator)
            yield name, whole[part_of(parameter)]

    def _stored(
        self, model: PreTrainedModel, names: dict[str, torch.nn.Parameter]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder, under peft's names, which do not have the adapter's own name."""
        folder = Path(self.adapter or "")
        for file in (_FILE, ADAPTER):
            if not (folder / file).is_file():
                raise ValueError(f"{folder} has no {file}")
        self._require_kind(model, folder)
        stored = SafetensorsFolder(_names_in(folder / _FILE))
        # peft writes embeddings that have an adapter themselves, too.
        base = {name: p for name, p in model.named_parameters() if name in stored.shapes and "base_layer" in name}
        expected = {_stored_name(name): tuple(parameter.shape) for name, parameter in (names | base).items()}
        if wrong := sorted(set(expected.items()) ^ set(stored.shapes.items())):
            raise ValueError(f"the adapter in {folder} does not fit the model: {len(wrong)} differ, first {wrong[:2]}")
        for name, parameter in base.items():
            present = local(parameter)
            if not torch.equal(present, stored.read(name, part_of(parameter)).to(present)):
                raise ValueError(f"the adapter in {folder} belongs to another base model: its {name} differs")
        for name, parameter in names.items():
            values = stored.read(_stored_name(name), part_of(parameter)).to(parameter.dtype)
            require_finite(values, _stored_name(name), folder / _FILE)
            yield name, values

    def _require_kind(self, model: Any, folder: Path) -> None:
        """Refuse an adapter whose tensors would say something else in this source's model."""
        from rl_bridge.weights.adapters import deciding

        expected = deciding(model.peft_config[_ADAPTER].to_dict())
        stored = deciding(json.loads((folder / ADAPTER).read_text("utf-8")))
        wrong = [name for name in stored if stored[name] != expected.get(name)]
        if not wrong:
            return
        text = (
            f"the adapter in {folder} has {dict(zip(wrong, map(stored.get, wrong), strict=True))}, "
            f"and this source {dict(zip(wrong, map(expected.get, wrong), strict=True))}"
        )
        if special := [name for name in wrong if name not in _OPTIONS]:
            text += (
                f": with {', '.join(special)} it is no plain LoRA of the base model; convert it to plain LoRA with "
                "peft (save_pretrained with path_initial_model_for_weight_conversion), or merge it into its base "
                "(merge_and_unload) and train that"
            )
        raise ValueError(text)


def _stored_name(name: str) -> str:
    return _FACTOR.sub(lambda factor: factor.group().removesuffix(f".{_ADAPTER}"), name)


@contextmanager
def _targets_as_they_are() -> Iterator[None]:
    """Keep peft from taking the targets of a mixture for those of transformers 4.

    There "gate_proj" was a layer of each expert. peft would adapt the stacks of experts and the routers instead, and
    leave out the dense layers of that name.
    """
    from peft.utils import transformers_weight_conversion as conversion

    with _PATCHING:
        original = conversion.convert_peft_config_for_transformers
        conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
        try:
            yield
        finally:
            conversion.convert_peft_config_for_transformers = original


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError('LoRA needs peft: pip install ".[lora]"') from error
    return peft


def _names_in(file: Path) -> dict[str, Path]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


@contextmanager
def _without_adapters(model: Any) -> Iterator[PreTrainedModel]:
    """The base as it was before peft: its own modules under its own names, which its source knows."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    layers = [
        (owner, name, child)
        for owner in base.modules()
        for name, child in owner._modules.items()
        if isinstance(child, LoraLayer)
    ]
    try:
        for owner, name, layer in layers:
            owner._modules[name] = layer.get_base_layer()
        yield base
    finally:
        for owner, name, layer in layers:
            owner._modules[name] = layer  # type: ignore[assignment]
