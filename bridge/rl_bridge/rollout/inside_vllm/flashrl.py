"""FlashRL's environment variables: quantised rollouts for any trainer that drives vLLM, without a change to it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download

from rl_bridge.weights.source import LAYOUTS

CONFIG, HEAD, LEVEL, FILE, RELOAD = VARIABLES = (
    "FLASHRL_CONFIG",
    "FLASHRL_LMHEAD_FP32",
    "FLASHRL_LOGGING_LEVEL",
    "FLASHRL_LOGGING_FILE",
    "FLASHRL_TEST_RELOAD",
)
FUNCTIONS = {
    "bf16": "bf16",
    "int8": "int8",
    "int8_fast": "int8",
    "int8_wo_prune": "int8",
    "fp8": "fp8",
    "fp8_fast": "fp8",
    "fp8_vllm": "fp8",
    "fp8_vllm_fast": "fp8",
    "fp8_tensor": "fp8",
    "fp8_channel": "fp8_channel",
    "fp8_block": "fp8_block",
}
"""FlashRL's names of quantising functions → the precision here. "fast" is about copies that are not made here."""
# Fields that FlashRL writes for its own patches, which have nothing to do here.
_WITHOUT_MEANING = ("load_format", "quantization", "distributed_executor_backend", "module_attribute_to_preserve")


@dataclass(frozen=True)
class Setting:
    """The quantisation that one data-parallel rank samples with."""

    fn: str
    """A name of ``FUNCTIONS``."""
    model: str | None = None
    """Starts the engine in the place of the trainer's model, whose updates come all the same."""
    profile: str | None = None
    """File of ``rl-fn quantize profile``: only the weights that it lists are quantised."""

    def __post_init__(self) -> None:
        """Refuse a name that cannot be applied."""
        if self.fn not in FUNCTIONS:
            why = "; dead neurons are not pruned here" if self.fn == "int8_prune" else ""
            raise ValueError(f"fn must be one of {', '.join(FUNCTIONS)}, got {self.fn!r}{why}")

    @property
    def precision(self) -> str:
        """The precision of the linear layers: "bf16" leaves them as the engine has them."""
        return FUNCTIONS[self.fn]

    @property
    def quantizes(self) -> bool:
        """Whether weights become codes."""
        return self.precision in LAYOUTS


@dataclass(frozen=True)
class Settings:
    """All that the variables say."""

    ranks: tuple[Setting, ...]
    """Data-parallel rank r has number r modulo their count."""
    head_fp32: bool = False
    reload: tuple[str, ...] = ()
    """Models that every engine loads again, one after another, once it has started."""

    def of(self, rank: int) -> Setting:
        """The setting of a data-parallel rank.

        >>> Settings((Setting("int8"), Setting("bf16"))).of(3).precision
        'bf16'
        """
        return self.ranks[rank % len(self.ranks)]

    @property
    def model(self) -> str | None:
        """The model that engines start from; None is the trainer's own.

        Raises:
            ValueError: ranks differ in it, and an engine core has one.
        """
        models = {setting.model for setting in self.ranks}
        if len(models) > 1:
            raise ValueError(f"all ranks start from one model, got {sorted(map(str, models))}: leave model out")
        return next(iter(models))


def settings_of(environment: Mapping[str, str]) -> Settings | None:
    """The settings that the variables give; None where none of them is set.

    Raises:
        ValueError: a variable or a file that cannot be read as FlashRL has it. Nothing is ignored but the fields that
            FlashRL has for its own patches.
    """
    if not any(environment.get(name) for name in VARIABLES):
        return None
    if head := {environment.get(HEAD, "0") or "0"} - {"0", "1"}:
        raise ValueError(f"{HEAD} must be 0 or 1, got {head.pop()!r}")
    ranks = _configs(environment.get(CONFIG, "").strip() or "bf16")
    names = (name.strip() for name in environment.get(RELOAD, "").split(","))
    return Settings(ranks, environment.get(HEAD) == "1", tuple(name for name in names if name))


def set_logging(environment: Mapping[str, str]) -> None:
    """The level and the file of this package's messages about engines.

    Raises:
        ValueError: no such level.
        OSError: the file cannot be written.
    """
    logger, level = logging.getLogger("rl_bridge.rollout.inside_vllm"), environment.get(LEVEL, "").upper()
    if level:
        if level not in logging.getLevelNamesMapping():
            raise ValueError(f"{LEVEL} must be a level of logging, got {environment[LEVEL]!r}")
        logger.setLevel(level)
    path = environment.get(FILE)
    if path and not any(
        getattr(handler, "baseFilename", None) == str(Path(path).absolute()) for handler in logger.handlers
    ):
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def read_configs(path: Path) -> list[dict[str, Any]]:
    """The entries of a file that ``rl-fn quantize setup`` or ``flashrl setup`` wrote.

    Raises:
        ValueError: another kind of file.
    """
    try:
        read = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    configs = read.get("configs") if isinstance(read, dict) else None
    if not isinstance(configs, list) or not configs or not all(isinstance(entry, dict) for entry in configs):
        raise ValueError(f"{path} must have a list 'configs' of at least one entry")
    return configs


def _configs(config: str) -> tuple[Setting, ...]:
    if config in FUNCTIONS:
        return (Setting(config),)
    path = Path(config)
    if not path.is_file():
        owner, name, *rest = (*config.split("/"), "", "")
        file = "/".join(part for part in rest if part)
        if not (owner and name and file):
            raise ValueError(f"{CONFIG} must be one of {', '.join(FUNCTIONS)} or a file, got {config!r}")
        try:
            path = Path(hf_hub_download(f"{owner}/{name}", file))
        except (OSError, ValueError) as error:
            raise ValueError(f"{CONFIG}={config!r} is no file here, and none on the hub: {error}") from error
    return tuple(setting_of(entry, str(path)) for entry in read_configs(path))


def setting_of(entry: Mapping[str, Any], where: str) -> Setting:
    """An entry of a file as a setting; fields for FlashRL's own patches are left out.

    Raises:
        ValueError: a field or a value that cannot be applied here.
    """
    names = {field.name for field in fields(Setting)}
    if unknown := sorted(entry.keys() - names - set(_WITHOUT_MEANING)):
        raise ValueError(f"{where}: {unknown[0]!r} cannot be applied here; there is {', '.join(sorted(names))}")
    return Setting(**{name: value for name, value in entry.items() if name in names})
