"""How long the rows of a run are: as the user says, or as the data has them."""

from collections.abc import Iterable

from rl_bridge.data.rows import supervised_row
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.memory.planning import Load, Pipeline
from rl_bridge.memory.sources import ConfigSource
from rl_bridge.memory.supervision import Rows, Supervision
from rl_bridge.memory.workload import Workload
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.comparisons import load_data
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.pipelines.reward_model import RewardModelPipeline
from rl_bridge.pipelines.sft import SFTPipeline, encoded
from rl_bridge.pipelines.training import load_model, load_rows


def workload_of(
    pipeline: Pipeline, prompt_tokens: int | None, completion_tokens: int | None
) -> tuple[ModelSource, Load]:
    """The model's structure, and the longest step of the run.

    Raises:
        ValueError: a model of the user's, whose data is not read, and a length that was not given.
    """
    if isinstance(pipeline, PolicyPipeline):
        if completion_tokens is not None:
            raise ValueError("completions of a policy have --policy.sampling.max-new-tokens")
        return _of_policy(pipeline, prompt_tokens)
    return _of_supervision(pipeline, prompt_tokens, completion_tokens)


def shown(load: Load) -> str:
    """The rows of a step in words."""
    if isinstance(load, Workload):
        return (
            f"{load.prompts} prompts of {load.prompt_tokens} tokens, {load.responses} completions each of "
            f"{load.new_tokens}"
        )
    each = "a completion" if load.completions == 1 else f"{load.completions} completions each"
    return f"{load.rows} rows of a prompt of {load.prompt_tokens} tokens and {each} of {load.new_tokens}"


def _of_policy(pipeline: PolicyPipeline, prompt_tokens: int | None) -> tuple[ModelSource, Workload]:
    if pipeline.model is None:
        rows = [row for part in load_rows(pipeline) for row in part]
        source, tokenizer = load_model(pipeline, rows)
        longest = max(len(tokenizer(str(row["prompt"])).input_ids) for row in rows)
    elif prompt_tokens is None:
        raise ValueError("the length of the prompts is not known before the data is read: give --prompt-tokens")
    else:
        source, longest = ConfigSource(pipeline.model), prompt_tokens
    config = pipeline.policy
    return source, Workload(
        prompts=config.prompts_per_step,
        responses=config.responses_per_prompt,
        prompt_tokens=prompt_tokens or longest,
        new_tokens=config.sampling.max_new_tokens,
    )


def _of_supervision(
    pipeline: Supervision, prompt_tokens: int | None, completion_tokens: int | None
) -> tuple[ModelSource, Rows]:
    """Without a model it is tiny and new, and its data is read; of a comparison the loss says the completions."""
    completions, held_out = 1, pipeline.held_out
    if not isinstance(pipeline, SFTPipeline):
        completions = {"triples": 3}.get(pipeline.loss.build().form, 2)
    if pipeline.model is not None:
        if prompt_tokens is None or completion_tokens is None:
            raise ValueError("the rows are not read: give --prompt-tokens and --completion-tokens of the longest")
        source: ModelSource = ConfigSource(pipeline.model)
        prompt, new = prompt_tokens, completion_tokens
    else:
        source, made, held_out, completions = _read(pipeline)
        prompt, new = _longest(made)
    if isinstance(pipeline, SFTPipeline):
        rows = pipeline.sft.rows_per_step
    elif isinstance(pipeline, RewardModelPipeline):
        rows = pipeline.reward_model.rows_per_step
    else:
        rows = pipeline.preference.rows_per_step
    return source, Rows(
        rows=rows,
        held_out=held_out,
        prompt_tokens=prompt_tokens or prompt,
        new_tokens=completion_tokens or new,
        completions=completions,
    )


def _read(pipeline: Supervision) -> tuple[ModelSource, list[Trajectory], int, int]:
    """The new model, all completions of the data, how many rows are held out, completions of the widest row."""
    if isinstance(pipeline, SFTPipeline):
        parts = load_rows(pipeline, (), supervised_row)
        source, tokenizer = load_model(pipeline, [row for part in parts for row in part])
        train, held_out = (encoded(pipeline, source, tokenizer, part)[0] for part in parts)
        return source, [*train, *held_out], len(held_out), 1
    data = load_data(pipeline, pipeline.loss.build())
    examples = [*data.examples, *data.held_out]
    made = [trajectory for example in examples for trajectory in example.completions]
    return data.source, made, len(data.held_out), max(len(example.completions) for example in examples)


def _longest(made: Iterable[Trajectory]) -> tuple[int, int]:
    """Tokens before the first that counts, and the others, of the longest."""
    longest = max(made, key=lambda trajectory: len(trajectory.tokens))
    first = list(longest.loss_mask).index(True)
    return first, len(longest.tokens) - first
