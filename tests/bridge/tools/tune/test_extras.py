"""What `make install` leaves out is named in one line, before anything is computed or written."""

import sys

import pytest

from rl_tools import cli

NEEDED = {
    "random": ("tune policy --space.optimizer.learning-rate log:1e-5..1e-3", "optuna", "tune"),
    "tpe": ("tune policy --sampler tpe --space.optimizer.learning-rate log:1e-5..1e-3", "optuna", "tune"),
    "cma-es": ("tune policy --sampler cma-es --space.optimizer.learning-rate log:1e-5..1e-3", "cmaes", "tune"),
    "mlflow": ("train policy --trackers mlflow", "mlflow", "trackers"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_extra_is_named_in_one_line(name, tmp_path, monkeypatch, capsys):
    command, library, extra = NEEDED[name]
    monkeypatch.setitem(sys.modules, library, None)
    output = tmp_path / "runs"
    assert cli.main([*command.split(), "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said == f"rl-fn: error: {library} is not installed: pip install '.[{extra}]'\n"
    assert not output.exists()
