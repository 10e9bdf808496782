"""A picture for each objective: loss and gradient against the probability ratio, drawn from rl_fn.recipes itself.

One completion of one token. π_old is 0.25 and also what sampled and the reference: a ratio up to 3 is a probability.
"""

import functools
import io
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import rl_fn
from rl_fn import recipes

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OLD = 0.25
RATIOS = tuple(np.linspace(0.004, 3.0, 750))
# Where an objective clips so close to 1 that the common scale shows a step, a second pair of axes shows this interval.
CLOSE = {"gspo": 1e-3, "gspo_token": 1e-3, "luspo": 5e-3}
SIGNS = {1.0: ("A = +1", "#1f6fb4", "-"), -1.0: ("A = −1", "#d1592a", "--")}
LIMIT = 3.2


class Curves(NamedTuple):
    """Loss, less its value at ratio 1, and its derivative by log π, at each ratio."""

    loss: np.ndarray
    gradient: np.ndarray


def batch(logprob: jax.Array, advantage: float) -> rl_fn.Batch:
    """One completion of one token, with every field that a recipe's loss may read."""
    old = jnp.full((1, 1), np.log(OLD), jnp.float32)
    return rl_fn.Batch(
        logprobs=jnp.reshape(logprob, (1, 1)),
        old_logprobs=old,
        advantages=jnp.full((1, 1), advantage, jnp.float32),
        mask=jnp.ones((1, 1), bool),
        rollout_logprobs=old,
        ref_logprobs=old,
        correct=jnp.full((1, 1), advantage > 0),
        noise=jnp.full((1, 1), 0.5, jnp.float32),
    )


@functools.cache
def curves(objective: Callable, advantage: float, ratios: tuple[float, ...]) -> Curves:
    """The objective at each ratio, for one advantage."""

    def loss(logprob: jax.Array) -> jax.Array:
        return objective(batch(logprob, advantage))[0]

    at = jnp.asarray(np.log(OLD) + np.log(np.append(ratios, 1.0)), jnp.float32)
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss)))(at)
    return Curves(np.asarray(values[:-1] - values[-1]), np.asarray(gradients[:-1]))


def _axes(axes: Axes, label: str, *, small: bool) -> None:
    axes.set_xlim(0, 3)
    axes.set_ylim(-LIMIT, LIMIT)
    axes.set_yticks([-3, -2, -1, 0, 1, 2, 3])
    axes.set_xticks([0, 1, 2, 3])
    axes.axhline(0, color="#999999", linewidth=0.7, zorder=0)
    axes.axvline(1, color="#999999", linewidth=0.7, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    if small:
        axes.set_xticklabels([])
        axes.set_yticklabels([])
        axes.tick_params(length=2)
        return
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("ratio ρ = π / π_old")
    axes.set_title(label, fontsize=11, loc="left")


def _draw(axes: Axes, name: str, which: str, ratios: tuple[float, ...], *, width: float) -> None:
    objective = getattr(recipes, name)()
    for sign, (label, color, style) in SIGNS.items():
        y = getattr(curves(objective, sign, ratios), which)
        # A jump is a gap, not a steep line; what leaves the axes stays out of the file.
        y = np.where(np.abs(y) > 3 * LIMIT, np.nan, y)
        axes.plot(ratios, y, color=color, linestyle=style, linewidth=width, label=label)


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    return file.getvalue()


TITLES = {"loss": "loss, less its value at ρ = 1", "gradient": "gradient: ∂ loss / ∂ log π"}


def picture(name: str, which: str) -> bytes:
    """One panel, `which` is "loss" or "gradient", as SVG."""
    with plt.rc_context({"font.size": 10, "svg.hashsalt": name}):
        figure, axes = plt.subplots(figsize=(3.9, 3.0), layout="constrained")
        _axes(axes, TITLES[which], small=False)
        _draw(axes, name, which, RATIOS, width=2.0)
        axes.legend(frameon=False, loc="upper center", ncols=2, fontsize=9)
        if name in CLOSE:
            _close(axes, name, which)
        return _svg(figure)


def _close(axes: Axes, name: str, which: str) -> None:
    """The neighbourhood of ratio 1, where the clip is, inside the panel."""
    ratios = tuple(np.linspace(1 - CLOSE[name], 1 + CLOSE[name], 401))
    inset = axes.inset_axes((0.56, 0.1, 0.4, 0.28))
    _draw(inset, name, which, ratios, width=1.4)
    inset.set_xlim(ratios[0], ratios[-1])
    inset.set_xticks([ratios[0], ratios[-1]], [f"1 − {CLOSE[name]:g}", f"1 + {CLOSE[name]:g}"], fontsize=7)
    inset.tick_params(labelsize=7, length=2)
    if which == "gradient":
        inset.set_ylim(-1.3, 1.3)
    inset.spines[["top", "right"]].set_visible(False)


def thumbnail(name: str) -> bytes:
    """The gradient alone, for the page's overview."""
    with plt.rc_context({"font.size": 8, "svg.hashsalt": name}):
        figure, axes = plt.subplots(figsize=(1.7, 1.3), layout="constrained")
        _axes(axes, "", small=True)
        _draw(axes, name, "gradient", RATIOS, width=1.6)
        return _svg(figure)


def pictures() -> dict[str, bytes]:
    """All files by their path in the site."""
    made = {}
    for name in recipes.__all__:
        made |= {f"pictures/{name}_{which}.svg": picture(name, which) for which in TITLES}
        made[f"pictures/{name}_small.svg"] = thumbnail(name)
    return made
