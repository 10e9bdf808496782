"""Reads exported folders with the transformers that PYTHONPATH names: python transformers4.py LIST OUT.

LIST is a JSON list of folders. OUT gets, by folder, the logits of a few tokens, the ids of a few texts and what the
configurations say; or the error.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

TEXTS = ["hello world", " 2023 650841823", "a\n\n  b\t12\r\n", "x<|im_start|> y <|im_end|>z"]


def read(folder, tokenizer_of=transformers.AutoTokenizer.from_pretrained):
    """What this version makes of a folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    found = {"version": transformers.__version__}
    if (Path(folder) / "model.safetensors").is_file():
        # The kernels of state spaces are a GPU's.
        changes = {"use_mamba_kernels": False} if hasattr(config, "use_mamba_kernels") else {}
        loading = {"attn_implementation": "eager", **changes}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **loading).eval()
        ids = torch.arange(3, 43)[None] % config.get_text_config().vocab_size
        with torch.no_grad():
            # Layers that share keys take them from the cache in transformers 4.
            cache = bool(getattr(config, "num_kv_shared_layers", 0))
            found["logits"] = model.float()(ids, use_cache=cache).logits[0, -1].tolist()
        generation = model.generation_config
        found["stop"] = [generation.eos_token_id, generation.pad_token_id, generation.temperature, generation.top_p]
        found["dtype"] = str(config.dtype)
    if (Path(folder) / "tokenizer.json").is_file():
        tokenizer = tokenizer_of(folder)
        found["ids"] = [tokenizer(text).input_ids for text in TEXTS]
        found["fields"] = sorted(tokenizer("hello"))
        found["special"] = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
        found["special"].pop("additional_special_tokens", None)
        found["template"] = tokenizer.chat_template
    return found


def main(folders, out):
    """Write what is read of each folder."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    for folder in folders:
        try:
            results[folder] = read(folder)
        except Exception as error:  # of any kind, that of the version
            results[folder] = {"error": f"{type(error).__name__}: {error}"[:300]}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
