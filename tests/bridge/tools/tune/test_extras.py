"""What `make install` leaves out is named in one line, before anything is computed or written."""

import sys

import pytest

from rl_tools import cli

NEEDED = {
    "tpe": ("tune policy --sampler tpe --space.optimizer.learning-rate log:1e-5..1e-3", "optuna", "tune"),
    "mlflow": ("train policy --trackers mlflow", "mlflow", "trackers"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_extra_is_named_in_one_line(name, tmp_path, monkeypatch, capsys):
    command, library, extra = NEEDED[name]
    monkeypatch.setitem(sys.modules, library, None)
    for module in [module for module in sys.modules if module == "rl_tools.tune.library_samplers"]:
        monkeypatch.delitem(sys.modules, module)
    output = tmp_path / "runs"
    assert cli.main([*command.split(), "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said == f"rl-fn: error: {library} is not installed: pip install '.[{extra}]'\n"
    assert not output.exists()
