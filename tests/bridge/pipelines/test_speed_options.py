"""Options that change what a step costs change none of its numbers."""

import pytest

from rl_tools.cli import main
from tests.support.results import metrics

OPTIONS = {"--sft.steps": 0, "--policy.steps": 2, "--policy.evaluate-every": 2, "--policy.updates-per-step": 2}
TIMES = {"seconds", "time", "tokens_per_second", "run", "attempt"}


def numbers(folder):
    return [
        {key: value for key, value in record.items() if key not in TIMES and isinstance(value, float | int)}
        for record in metrics(folder)
    ]


@pytest.mark.long
def test_sharing_prefixes_and_the_fused_loss_change_no_number(arguments, run_to_end):
    plain = numbers(run_to_end(arguments("plain", "--no-share-prefixes", **OPTIONS)))
    assert len(plain) == 2
    for name, options in {"shared": (), "fused": ("--fused-loss",)}.items():
        found = numbers(run_to_end(arguments(name, *options, **OPTIONS)))
        assert [record.keys() for record in found] == [record.keys() for record in plain]
        for record, expected in zip(found, plain, strict=True):
            assert record == pytest.approx(expected, rel=1e-3, abs=2e-5)


def test_a_loss_over_sequences_cannot_be_fused(arguments, capsys):
    assert main(arguments("never", "objective:gspo", "--fused-loss", **OPTIONS)) == 1
    assert "fused_loss takes losses in which no token's term depends on another token" in capsys.readouterr().err
