"""The page for those who come from another library names options, algorithms and losses that there are."""

import dataclasses
import importlib
import re

import pytest

from rl_bridge.data.messages import ARGUMENTS
from rl_bridge.pipelines.objective_options import ALGORITHMS
from rl_bridge.rollout.vllm.engine_options import ALLOWED
from rl_tools.trainer_options import TRAINERS
from rl_train.compared import LOSSES, REWARD_MODEL_LOSSES
from tests.repository.coming_from import PAGE, section

CODE = " ".join(re.findall(r"`([^`]+)`", PAGE))
CHOICES = {"objective": ALGORITHMS, "loss": {**LOSSES, **REWARD_MODEL_LOSSES}}


def written(name):
    return name.replace("_", "-")


def options_of(config, before=""):
    """The options of a config as they are written on the command line."""
    found = set()
    for field in dataclasses.fields(config):
        found.add(name := before + written(field.name))
        value = getattr(config, field.name, None)
        if field.name in CHOICES and not before:
            kinds = CHOICES[field.name].values()
            # A sub-command's class is made without arguments unless a constant has no default.
            found |= {f"{name}.{written(constant.name)}" for kind in kinds for constant in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= options_of(value, f"{name}.")
    return found


@pytest.fixture(scope="module")
def options():
    found = {}
    for command, trainer in TRAINERS.items():
        module, _, name = trainer.default.partition(":")
        found[command] = options_of(getattr(importlib.import_module(module), name)())
    return found


def test_every_option_on_the_page_is_on_a_command_line(options):
    named = set(re.findall(r"--([a-z][a-z0-9.-]*[a-z0-9])", CODE))
    known = set().union(*options.values())
    positive = {name.removeprefix("no-") if name not in known else name for name in named}
    assert len(named) > 60 and positive <= known, sorted(positive - known)


def test_every_algorithm_and_loss_on_the_page_is_one(options):
    for kind, choices in CHOICES.items():
        named = set(re.findall(rf"\b{kind}:([a-z0-9-]+)", CODE))
        assert named and named <= {written(name) for name in choices}, named


def test_the_page_reads_the_options_that_a_command_line_reads(options):
    assert {"policy.sampling.temperature", "objective.kl.coef", "objective.clip-high"} <= options["policy"]
    assert "loss.beta" in options["preference"] and "objective.kl.coef" not in options["sft"]


def test_every_section_says_what_is_lacking():
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    libraries = [section for section in sections if section.startswith(("RL2", "RLite", "TRL", "verl"))]
    assert len(libraries) == 4 and all("Not here" in section for section in libraries)


# Names that are lacking, and of another meaning than an option or an argument of vLLM's engine that has the name.
OTHERS = {
    "eps": "added to the odds of ORPO",
    "trust_remote_code": "code in the folder of a model that is trained",
    "log_level": "of the trainer's own messages",
}


def test_nothing_that_is_here_is_named_as_lacking(options):
    known = set().union(*options.values())
    here = {name.rpartition(".")[2].replace("-", "_") for name in known} | set(ALLOWED) | {ARGUMENTS}
    parts = [part.partition("\n## ")[0] for part in re.split(r"^Not here", PAGE, flags=re.MULTILINE)[1:]]
    lacking = {name for part in parts for name in re.findall(r"`([a-z_0-9]+)`", re.split(r"\n\n(?!- )", part)[0])}
    both = {name for name in lacking if here & {name, name.removeprefix("vllm_"), name.removeprefix("apply_")}}
    assert len(lacking) > 120 and both == set(OTHERS), both


# Arguments of RL2's configs (ppo, fsdp, sft, rm, dpo, simpo, orpo) and public names of RLite, as published in 2025.
OF_RL2 = """
path max_length batch_size prompt_key response_key messages_key chosen_key rejected_key apply_chat_template test_ratio
train_prompts_per_rollout test_prompts_per_rollout prompts_per_rollout responses_per_prompt max_turns max_new_tokens
mask_offpolicy_data model_name use_liger_kernel dtype enable_gradient_checkpointing gradient_checkpointing ddp_size
tp_size cp_size sp_size max_length_per_device max_inference_length_per_device lr weight_decay max_grad_norm scheduler
warmup_ratio offload_optimizer offload_model temperature update_per_rollout clip tis_coef avg_level freeze_steps
kl.coef kl.type kl.reward_estimator kl.loss_estimator entropy.coef server_args model_path mem_fraction_static
train_sampling_params test_sampling_params stop no_stop_trim env_path partial_rollout dynamic_filtering adv.estimator
adv.gamma adv.lamda adv.global_norm adv.norm_var beta gamma lambda_orpo eps apply_len_norm project experiment_name
load_ckpt_from total_steps n_epochs test_freq save_dir save_freq use_wandb
"""
OF_RLITE = """
init ResourceManager RliteTrainEngine RliteInferenceEngine OoneTrainEngine OoneInferenceEngine NeedParallel
DummySummaryWriter build tensor_parallel_size pipeline_parallel_size data_parallel_size allow_colocate colocate_with
not_colocate_with materialization_source on_weights_materialized HuggingFaceFsdp2TrainModule cuda cpu meta device
release_memory_cache generate p2p_weight_sync state_dict load_state_dict save load network_interface dedup_logs
debug_mode
"""


@pytest.mark.parametrize("library, names", [("RL2", OF_RL2), ("RLite", OF_RLITE)])
def test_every_argument_is_mapped_or_named_as_lacking(library, names):
    words = section(library)
    assert [name for name in names.split() if not re.search(rf"\b{re.escape(name)}\b", words)] == []
