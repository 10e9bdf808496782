"""What `rl-fn check` does without a library, with one that agrees and with one that differs."""

import sys
import types

import numpy as np
import pytest

from rl_tools import cli
from rl_tools.check import cases
from rl_tools.check.cases import Case, Example, difference


def _case(shift: float) -> Case:
    def numbers(x: float):
        return lambda example: (example.rewards + np.float32(x), None)

    return Case("loss plain", numbers(0.0), numbers(shift), numbers(1.0))


@pytest.fixture
def library(monkeypatch):
    """A library `trl` whose only comparison differs by a given shift."""

    def install(shift: float) -> None:
        module = types.ModuleType("rl_tools.check.of_a_test")
        module.cases = lambda: [_case(shift)]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cases.MODULES, "trl", ("of_a_test",))
        monkeypatch.setattr(cases, "version", lambda _: "0.0")

    return install


def test_agreement_is_0_and_a_difference_is_1(library, capsys):
    library(0.0)
    assert cli.main(["check", "trl"]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out
    library(0.1)
    assert cli.main(["check", "trl"]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 agree" in out and "differs" in out


def test_an_absent_library_is_2_with_what_to_do(monkeypatch, capsys):
    monkeypatch.setitem(cases.DISTRIBUTIONS, "verl", "no-such-distribution")
    assert cli.main(["check", "verl"]) == 2
    assert "verl is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check"], ["check", "ppo"], ["check", "trl", "verl"]])
def test_wrong_words_are_2_with_the_usage(words, capsys):
    assert cli.main(words) == 2
    assert "usage: rl-fn check {trl,verl,openrlhf,tunix}" in capsys.readouterr().out


def test_a_difference_is_seen_where_it_is_and_where_only_one_is_finite():
    a = np.array([1.0, 2.0])
    assert difference(a, a) == (0.0, 0.0)
    assert difference(a, np.array([1.0, 4.0])) == (2.0, 0.5)
    assert difference(a, np.array([1.0, np.nan]))[0] == np.inf
    assert difference(a, a[:1])[0] == np.inf
    nan = np.array([np.nan, np.inf])
    assert difference(nan, nan) == (0.0, 0.0)


def test_an_example_has_the_rows_that_it_promises():
    example = Example.random(0, empty_row=True, hole=True)
    assert not example.mask[0].any() and list(example.mask[1][2:6]) == [True, False, False, True]
    assert example.token_rewards()[0].sum() == 0
    np.testing.assert_array_equal(example.token_rewards()[1:].sum(1), example.rewards.reshape(-1)[1:])


def test_a_branch_is_run_out_of_an_installed_method():
    class Trainer:
        def method(self, x):
            if self.kind == "double":
                y = 2 * x
            elif self.kind == "triple":
                y = 3 * x
            return y + unknown  # noqa: F821

    me = types.SimpleNamespace(kind="triple")
    assert cases.run_branch(Trainer.method, "self.kind", "y", {"self": me, "x": 5})["y"] == 15
    with pytest.raises(LookupError, match=r"no branch on 'self\.kind' that sets 'z'"):
        cases.run_branch(Trainer.method, "self.kind", "z", {})
