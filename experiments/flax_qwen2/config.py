"""The shape of a Qwen2 decoder, as Hugging Face writes it into ``config.json``."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config:
    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int | None = None
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.05
    pad_token_id: int = 0
    eos_token_id: int = 1

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads without head_dim, "
                    f"got {self.hidden_size} and {self.num_attention_heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_size % 2:
            raise ValueError(f"rotary embeddings need an even head_dim, got {self.head_dim}")

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @classmethod
    def from_huggingface(cls, config: dict[str, Any]) -> "Qwen2Config":
        """Read a parsed ``config.json``; what this decoder does not compute is refused, never ignored."""
        if config.get("model_type") != "qwen2":
            raise NotImplementedError(f"model_type must be 'qwen2', got {config.get('model_type')!r}")
        if config.get("hidden_act", "silu") != "silu":
            raise NotImplementedError(f"hidden_act must be 'silu', got {config['hidden_act']!r}")
        layer_types = set(config.get("layer_types") or ["full_attention"])
        if config.get("use_sliding_window") or layer_types != {"full_attention"}:
            raise NotImplementedError(f"only full attention is implemented, got layer_types={sorted(layer_types)}")
        # transformers 5 nests what transformers 4 wrote flat.
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise NotImplementedError(f"rope_type must be 'default', got {kind!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in config.items() if name in known and value is not None}
        values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        eos = values.get("eos_token_id")
        if isinstance(eos, list):
            if len(eos) != 1:
                raise NotImplementedError(f"one eos_token_id is supported, got {eos}")
            values["eos_token_id"] = eos[0]
        # Hugging Face's default for a Qwen2 without the key.
        values.setdefault("tie_word_embeddings", False)
        return cls(**values)

    def to_huggingface(self) -> dict[str, Any]:
        """What ``AutoModelForCausalLM`` needs in ``config.json``."""
        values = dataclasses.asdict(self)
        theta = values.pop("rope_theta")
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "dtype": "float32",
            "hidden_act": "silu",
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "use_cache": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            **values,
        }
