"""One HTML file about runs: curves, completions, warnings, options. Nothing is loaded from a network."""

from rl_tools.report.page import write_report

__all__ = ["write_report"]
