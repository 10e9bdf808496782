"""What an engine of vLLM is asked for; readable without vLLM."""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rl_bridge.rollout.vllm.arguments import require_allowed
from rl_bridge.weights.quantized import LAYOUTS, Precision

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Options of an engine of vLLM.

    >>> VLLMOptions(precision="bf16").activations
    'bfloat16'
    """

    precision: Precision = "fp32"
    """Of the matrices in the engine. The trainer's weights stay as they are; each update converts what is sent."""
    rank_precisions: tuple[Precision, ...] = ()
    """Of the matrices in the engines of data-parallel workers, in turn, in the place of ``precision``: a list of two
    makes every other engine as the second says. Each engine is sent the same weights and quantises them itself."""
    dtype: Dtype | None = None
    """Of the activations and of what is not quantised. None: float32 for fp32, else bfloat16."""
    max_model_len: int | None = None
    """Tokens of the longest sequence, prompt and completion. None: as many as the model can read."""
    max_num_seqs: int = 256
    """Sequences that run together; others wait."""
    kv_cache_gib: float | None = 1.0
    """Memory for keys and values, in GiB. None: what vLLM finds left on the device."""
    enforce_eager: bool = True
    """No compilation and no CUDA graphs: a start of seconds. Long runs on a GPU are faster with False."""
    sleep: bool = False
    """Let weights, keys and values leave a GPU while others work there (vLLM's sleep mode)."""
    tensor_parallel_size: int = 1
    """Processes that one engine is cut over, each with its share of every layer."""
    adapter_rank: int | None = None
    """Take LoRA adapters of up to this rank as such, beside the weights that the engine started from. None: merged."""
    replacements: int = 3
    """Weight updates in a row that may need a fresh engine; with one more the run stops."""
    proof_tolerance: float | None = None
    """Nats between engine and trainer that the proof of an update allows in the mean, and in proportion at most. None:
    by the precision, 0.3 for quantised matrices. A model that int8 changes more can be allowed more; it needs a
    correction all the more."""
    arguments: tuple[str, ...] = ()
    """More arguments of ``vllm.EngineArgs``, each ``NAME=JSON``: ``gpu_memory_utilization=0.4``. Those that change
    draws, their log-probabilities or the model are refused by name (docs/rollouts.md has the list)."""

    def __post_init__(self) -> None:
        """Refuse what no engine can be.

        Raises:
            ValueError: with the option and its value.
        """
        for precision in (self.precision, *self.rank_precisions):
            if precision not in get_args(Precision):
                raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
        if self.rank_precisions and self.precision != "fp32":
            raise ValueError(f"either precision or rank_precisions, got {self.precision} and {self.rank_precisions}")
        if self.rank_precisions and self.tensor_parallel_size > 1:
            raise ValueError(
                "an engine that quantises by itself (rank_precisions) is of one process, got tensor_parallel_size="
                f"{self.tensor_parallel_size}: take precision"
            )
        kinds = {"fp32", "bf16"} & {*self.rank_precisions}
        if len(kinds) > 1 or (kinds == {"bf16"} and self.dtype == "float32"):
            raise ValueError(
                f"all ranks have one dtype of activations, got {self.rank_precisions} and dtype {self.dtype}"
            )
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))} or None, got {self.dtype!r}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "tensor_parallel_size",
            "kv_cache_gib",
            "adapter_rank",
            "proof_tolerance",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.replacements < 0:
            raise ValueError(f"replacements must be ≥ 0, got {self.replacements}")
        self.engine_arguments()

    @property
    def activations(self) -> Dtype:
        """The dtype of activations."""
        plain = self.precision == "fp32" if not self.rank_precisions else "fp32" in self.rank_precisions
        return self.dtype or ("float32" if plain else "bfloat16")

    def of_build(self, tensor_parallel_size: int) -> "VLLMOptions":
        """With what ``InferenceEngine.build`` was given; 1 is nothing.

        >>> VLLMOptions().of_build(2).tensor_parallel_size
        2

        Raises:
            ValueError: the options say another number.
        """
        if tensor_parallel_size == 1 or tensor_parallel_size == self.tensor_parallel_size:
            return self
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"build(tensor_parallel_size={tensor_parallel_size}) and "
                f"VLLMOptions(tensor_parallel_size={self.tensor_parallel_size}): say one number"
            )
        return replace(self, tensor_parallel_size=tensor_parallel_size)

    def of_rank(self, rank: int) -> tuple["VLLMOptions", Precision | None]:
        """The options of a data-parallel worker, and what its engine quantises by itself, if anything.

        >>> VLLMOptions(rank_precisions=("fp32", "int8")).of_rank(3)[1]
        'int8'
        """
        if not self.rank_precisions:
            return self, None
        precision = self.rank_precisions[rank % len(self.rank_precisions)]
        options = replace(self, precision=precision, dtype=self.activations, rank_precisions=())
        return options, precision if precision in LAYOUTS else None

    def engine_arguments(self) -> dict[str, Any]:
        """``arguments`` by name.

        >>> VLLMOptions(arguments=("gpu_memory_utilization=0.4", "enable_sleep_mode=true")).engine_arguments()
        {'gpu_memory_utilization': 0.4, 'enable_sleep_mode': True}

        Raises:
            ValueError: for text that is not ``NAME=JSON``, and for names that are not on ``arguments.ALLOWED``.
        """
        found = {}
        for text in self.arguments:
            name, _, value = text.partition("=")
            name = name.strip().removeprefix("--").replace("-", "_")
            require_allowed(name)
            try:
                found[name] = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"an argument of vLLM is NAME=JSON, got {text!r}") from error
        return found
