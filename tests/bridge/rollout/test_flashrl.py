"""FlashRL's environment variables, read without vLLM."""

import logging

import pytest
import yaml

from rl_bridge.rollout.inside_vllm.flashrl import (
    FILE,
    FUNCTIONS,
    HEAD,
    LEVEL,
    Setting,
    Settings,
    set_logging,
    settings_of,
)


def test_without_a_variable_nothing_is_set():
    assert settings_of({}) is None
    assert settings_of({"FLASHRL_CONFIG": ""}) is None


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_name_is_every_ranks_setting(fn):
    settings = settings_of({"FLASHRL_CONFIG": f" {fn} ", HEAD: "1", "FLASHRL_TEST_RELOAD": "a, b/c,"})
    assert settings == Settings((Setting(fn),), head_fp32=True, reload=("a", "b/c"))
    assert settings.of(5).precision == FUNCTIONS[fn]
    assert settings.of(5).quantizes == (fn != "bf16")


def test_a_variable_alone_asks_for_exact_logprobs():
    assert settings_of({HEAD: "1"}) == Settings((Setting("bf16"),), head_fp32=True)


def test_a_file_has_a_setting_for_each_rank(tmp_path):
    """As flashrl setup --append writes it, with what is about its own patches."""
    own = {"load_format": "auto", "distributed_executor_backend": "external_launcher"}
    configs = [{"fn": "int8", "model": "m", **own}, {"fn": "bf16", "model": "m"}, {"fn": "fp8_channel", "model": "m"}]
    (tmp_path / "config.yaml").write_text(yaml.dump({"configs": configs}))
    settings = settings_of({"FLASHRL_CONFIG": str(tmp_path / "config.yaml")})
    assert settings is not None
    assert [settings.of(rank).precision for rank in range(5)] == ["int8", "bf16", "fp8_channel", "int8", "bf16"]
    assert settings.model == "m"
    with pytest.raises(ValueError, match="all ranks start from one model, got"):
        _ = Settings((Setting("int8", model="a"), Setting("bf16"))).model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("configs: [{fn: int4}]", "fn must be one of bf16, int8, .*got 'int4'"),
        ("configs: [{fn: int8_prune}]", "dead neurons are not pruned here"),
        ("configs: [{fn: int8, params_to_ignore: [q]}]", "'params_to_ignore' cannot be applied here"),
        ("configs: []", "must have a list 'configs'"),
        ("[1", "is no YAML"),
    ],
)
def test_what_cannot_be_applied_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        settings_of({"FLASHRL_CONFIG": str(tmp_path / "config.yaml")})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FLASHRL_CONFIG": "int4"}, "FLASHRL_CONFIG must be one of bf16, .* or a file, got 'int4'"),
        ({"FLASHRL_CONFIG": "int8", HEAD: "yes"}, "FLASHRL_LMHEAD_FP32 must be 0 or 1, got 'yes'"),
    ],
)
def test_variables_that_say_nothing_are_refused(variables, message):
    with pytest.raises(ValueError, match=message):
        settings_of(variables)


def test_messages_go_to_the_file_at_the_level(tmp_path):
    logger = logging.getLogger("rl_bridge.rollout.inside_vllm")
    level, handlers = logger.level, list(logger.handlers)
    try:
        for _ in range(2):  # every process calls it, some twice
            set_logging({LEVEL: "debug", FILE: str(tmp_path / "log")})
        logging.getLogger("rl_bridge.rollout.inside_vllm.quantized_loading").debug("quantised")
        assert (tmp_path / "log").read_text().count("DEBUG quantised") == 1
        with pytest.raises(ValueError, match="must be a level of logging, got 'loud'"):
            set_logging({LEVEL: "loud"})
    finally:
        logger.setLevel(level)
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
            handler.close()
