"""completions.jsonl: the loss's own numbers of each token, in a file that stays small and survives a kill."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.algorithms import completion_log
from rl_bridge.algorithms.completion_log import CompletionLog, due
from rl_bridge.algorithms.completions import Sampled
from rl_bridge.algorithms.policy_training import watched_rows
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import Engine, Mesh, NeedParallel
from rl_bridge.engines.dispatch import declared, returns
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.many_hosts import ManyHosts
from tests.support.policy_batch import make_batch
from tests.support.ready import ready

VARIANTS = {"apart": (25, False, "dapo"), "in the head": (25, True, "dapo"), "whole batch": (1, False, "clip_cov")}


def module_of(tokenizer, recipe, tokens, fused):
    model, optimizer = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=3), OptimizerConfig(learning_rate=1e-3)
    objective = getattr(rl_fn.recipes, recipe)()
    scoring = ScoringConfig(micro_batch_tokens=tokens)
    return ready(PolicyModule, model, optimizer, objective, updates=1, scoring=scoring, fused_loss=fused)


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_are_those_that_the_loss_was_computed_from(tokenizer, name):
    tokens, fused, recipe = VARIANTS[name]
    module, batch = module_of(tokenizer, recipe, tokens, fused), make_batch()
    marks = torch.tensor([-1, 2, -1, 0, 1, 3])
    metrics = module.train_step(batch, 9.0, None, marks)
    seen = module.take_watched()
    assert sorted(seen) == [0, 1, 2, 3] and module.take_watched() == {}

    # The objective, given these numbers alone, has the metrics that the module reported of these rows.
    ratio, entropy = [], []
    for row, mark in enumerate(marks.tolist()):
        counted = batch.mask[row, : batch.lengths[row]]
        if mark < 0:
            continue
        column = {key: torch.tensor(values)[counted] for key, values in seen[mark].items()}
        torch.testing.assert_close(column["advantage"], batch.advantages[row, : len(counted)][counted])
        torch.testing.assert_close(column["old_logprob"], batch.old_logprobs[row, : len(counted)][counted])
        torch.testing.assert_close(column["rollout_logprob"], batch.rollout_logprobs[row, : len(counted)][counted])
        torch.testing.assert_close(column["ratio"], (column["logprob"] - column["old_logprob"]).exp())
        ratio.append(column["ratio"])
        entropy.append(column["entropy"])
    assert min(map(len, ratio)) > 0 and torch.cat(ratio).std() > 0.1
    rest = module.train_step(batch.rows(marks < 0), 9.0)
    for key, values in (("ratio_mean", ratio), ("entropy", entropy)):
        # ``Ratio`` totals add up over rows.
        wanted = float(metrics[key].total) - float(rest[key].total)
        assert float(torch.cat(values).sum()) == pytest.approx(wanted, rel=1e-4)


def test_the_loss_of_these_numbers_is_the_loss(tokenizer):
    module, batch = module_of(tokenizer, "dapo", 10**6, False), make_batch()
    denominator = float(batch.mask.sum())
    metrics = module.train_step(batch, denominator, None, torch.arange(6))
    terms = []
    for row, column in sorted(module.take_watched().items()):
        counted = batch.mask[row, : batch.lengths[row]].numpy()
        ratio, advantage = (np.array(column[key])[counted] for key in ("ratio", "advantage"))
        terms.append(-np.minimum(ratio * advantage, np.clip(ratio, 1 - 0.2, 1 + 0.28) * advantage))
    loss = np.concatenate(terms).sum() / denominator
    total = metrics["policy_loss"]
    assert float(total.total / total.denominator) == pytest.approx(loss, rel=1e-4)


class Part:
    """A worker's share of the rows, without a process group: the methods that tell of single rows are the module's."""

    def __init__(self, module):
        self.module = module

    train_step = returns("sum")(lambda self, *arguments: self.module.train_step(*arguments))

    @returns(declared(PolicyModule.take_watched))
    def take_watched(self):
        return self.module.take_watched()


def test_numbers_of_rows_that_lie_with_several_workers_come_together(tokenizer):
    """Each worker tells of its own rows; ``watched_rows`` has all of them, with the numbers of one worker."""
    batch, marks = make_batch(), torch.tensor([3, -1, 0, 2, -1, 1])

    def watched_by(workers):
        policy = Engine(lambda: Part(module_of(tokenizer, "dapo", 25, False)), executor=ManyHosts(workers))
        policy.build(mesh=Mesh(replicate=workers))
        policy.train_step(NeedParallel(batch), 9.0, {}, NeedParallel(marks))
        return watched_rows(policy)  # type: ignore[arg-type]

    one, several = watched_by(1), watched_by(3)
    assert sorted(one) == sorted(several) == [0, 1, 2, 3]
    for mark, columns in one.items():
        for name, values in columns.items():
            assert several[mark][name] == pytest.approx(values, abs=1e-5), (mark, name)


def trajectories(count=4, length=3):
    return [
        single_turn([5, 6], range(7, 7 + length), logprobs=[-0.5 - i] * length, version=3, group=i // 2,
                    rewards={"right": float(i)})
        for i in range(count)
    ]  # fmt: skip


def written(folder, step=0, length=3, seen=None, computed=(False, True, True, False), every=1, kept=2):
    log = CompletionLog(folder, lambda ids: " ".join(map(str, ids)), every=every, kept=kept)
    drawn = trajectories(length=length)
    rewards = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    sampled = Sampled(
        trajectories=drawn, names=("right",), matrix=rewards[:, None], earned=rewards, rewards=rewards,
        greedy_rewards=None, applies=torch.ones(2, 1, rewards.shape[1], dtype=torch.bool), sampled_groups=2,
    )  # fmt: skip
    batch = collate(drawn, 0)
    batch = batch._replace(old_logprobs=batch.rollout_logprobs, advantages=batch.mask * torch.arange(4.0)[:, None])
    chosen = log.choose(step, torch.tensor(computed))
    if chosen is not None:
        log.write(step, sampled, batch, chosen, seen or {})
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text("utf-8").splitlines()]


def test_a_line_has_the_rows_that_are_computed_first(tmp_path):
    columns = {name: [0.0, 0.0, 1.25, 1.5, 1.75] for name in ("logprob", "ratio", "entropy")}
    (record,) = written(tmp_path, step=4, seen={0: columns})
    assert record["step"] == 4
    first, second = record["samples"]
    assert (first["row"], second["row"]) == (1, 2)
    assert first["reward"] == 1.0 and first["rewards"] == {"right": 1.0} and first["left_out"] == 0
    assert first["prompt"] == "5 6" and first["completion"] == "7 8 9"
    assert first["tokens"] == {
        "place": [2, 3, 4], "id": [7, 8, 9], "text": ["7", "8", "9"], "counted": [True] * 3, "version": [3] * 3,
        "logprob": [1.25, 1.5, 1.75], "old_logprob": [-1.5] * 3, "ratio": [1.25, 1.5, 1.75], "advantage": [1.0] * 3,
        "entropy": [1.25, 1.5, 1.75], "rollout_logprob": [-1.5] * 3,
    }  # fmt: skip
    # What the loss did not compute is not made up.
    assert second["tokens"]["ratio"] == [None] * 3 and second["tokens"]["advantage"] == [2.0] * 3


def test_first_and_last_rows_of_the_update_are_kept(tmp_path):
    log = CompletionLog(tmp_path, str, every=1, kept=4)

    def chosen(*computed):
        marks = log.choose(0, torch.tensor(computed, dtype=torch.bool))
        return [int((marks == number).nonzero()) for number in range(int(marks.max()) + 1)]

    assert chosen(0, 1, 1, 1, 0, 1, 1, 1) == [1, 2, 6, 7]
    assert chosen(0, 1, 0, 0, 0, 1, 1, 1) == [1, 5, 6, 7]
    assert chosen(0, 0, 1, 0, 0, 1) == [2, 5, 0, 1]
    assert chosen(0, 0, 1) == [2, 0, 1]


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(completion_log, "TOKENS", 4)
    (record,) = written(tmp_path, length=9)
    sample = record["samples"][0]
    assert sample["left_out"] == 5 and sample["tokens"]["place"] == [2, 3, 9, 10]
    assert sample["completion"] == " ".join(str(7 + i) for i in range(9))
    monkeypatch.setattr(completion_log, "BYTES", (tmp_path / "completions.jsonl").stat().st_size + 10)
    assert len(written(tmp_path, step=1)) == 1
    kept = sum(due(step, 1) for step in range(1_000_000))
    assert kept < 256 * (1 + math.log2(1_000_000 / 256))
    assert not any(due(step, 0) for step in range(9))


def test_the_file_s_bounds_are_those_that_its_page_tells():
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text("utf-8")
    part = page.split("**completions.jsonl.**")[1].split("\n**")[0].replace("\n", " ")
    (tokens,) = re.findall(r"At most (\d+) tokens of a completion", part)
    (steps,) = re.findall(r"After (\d+) steps at one distance the distance doubles", part)
    (mebibytes,) = re.findall(r"the file ends at (\d+) MiB", part)
    bounds = completion_log.TOKENS, completion_log.STEPS, completion_log.BYTES
    assert bounds == (int(tokens), int(steps), int(mebibytes) << 20)


def test_a_resumed_run_writes_what_was_cut_off_again(tmp_path):
    whole = written(tmp_path, step=0) and written(tmp_path, step=1) and written(tmp_path, step=2)
    file = tmp_path / "completions.jsonl"
    with file.open("a") as stream:
        stream.write('{"step": 3, "sam')
    assert written(tmp_path, step=2) == whole
    assert [record["step"] for record in whole] == [0, 1, 2]
    assert len(written(tmp_path, step=0)) == 1
