"""How fast the KL controllers of rl_fn settle: each in a loop with simulated policies of different inertia.

python experiments/controllers.py    # writes experiments/results/controllers/{settling.json,settling.png}

The plant is KLₜ₊₁ = KLₜ + rate · (free / (1 + sensitivity · coef) − KLₜ) + noise: without a penalty the policy drifts
to `free`, a penalty holds it back, and it moves a share `rate` of the way in one update.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn

OUT = Path(__file__).parent / "results" / "controllers"
TARGET, BAND, UPDATES = 0.1, 0.2, 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
    free: float
    rate: float
    sensitivity: float = 20.0

    @property
    def coef_at_target(self) -> float:
        return (self.free / TARGET - 1.0) / self.sensitivity


PLANTS = {
    "quick": Plant(free=1.0, rate=0.5),
    "inert": Plant(free=1.0, rate=0.1),
    "far": Plant(free=5.0, rate=0.2),
    "eager": Plant(free=0.2, rate=0.2),
}
CONTROLLERS = {
    "fixed_kl": rl_fn.fixed_kl(0.2),
    "exponential_kl": rl_fn.exponential_kl(TARGET),
    "linear_kl": rl_fn.linear_kl(TARGET, samples=512),
    "pid_kl": rl_fn.pid_kl(TARGET),
}


def simulate(
    controller: rl_fn.Controller, plant: Plant, updates: int = UPDATES, noise: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """KL before and coefficient after each update, starting at the reference policy."""
    shocks = noise * TARGET * jax.random.normal(jax.random.key(seed), (updates,))

    def step(carry, shock):
        state, kl = carry
        drift = plant.free / (1.0 + plant.sensitivity * state.coef) - kl
        kl = jnp.maximum(kl + plant.rate * drift + shock, 0.0)
        state = controller.update(state, kl)
        return (state, kl), (kl, state.coef)

    _, (kls, coefs) = jax.lax.scan(step, (controller.init(), jnp.zeros(())), shocks)
    return np.asarray(kls), np.asarray(coefs)


def settling_time(kls: np.ndarray, band: float = BAND) -> int | None:
    """Updates after which the KL stays within ±band of the target; None if it is outside at the end."""
    outside = np.flatnonzero(np.abs(kls / TARGET - 1.0) > band)
    last = int(outside[-1]) + 1 if outside.size else 0
    return last if last < kls.size else None


def overshoot(kls: np.ndarray) -> float:
    """How far the KL swings back beyond the target after its first excursion, as a share of the target.

    The KL starts below the target and passes it while the coefficient is still too small; that excursion is the
    disturbance. What the controller adds is the undershoot after it.
    """
    over = np.flatnonzero(kls > TARGET)
    if not over.size:
        return 0.0
    back = np.flatnonzero(kls[over[0] :] < TARGET)
    return float(1.0 - kls[over[0] + back[0] :].min() / TARGET) if back.size else 0.0


def table() -> list[dict[str, Any]]:
    rows = []
    for plant_name, plant in PLANTS.items():
        for name, controller in CONTROLLERS.items():
            kls, coefs = simulate(controller, plant)
            noisy, _ = simulate(controller, plant, noise=0.05)
            rest = noisy[UPDATES // 2 :] / TARGET - 1.0
            rows.append(
                {
                    "plant": plant_name,
                    "controller": name,
                    "settling_updates": settling_time(kls),
                    "peak_over_target": round(float(kls.max()) / TARGET, 3),
                    "overshoot": round(overshoot(kls), 3),
                    "final_coef": round(float(coefs[-1]), 4),
                    "coef_at_target": round(plant.coef_at_target, 4),
                    "rms_error_with_noise": round(math.sqrt(float(np.mean(rest**2))), 3),
                }
            )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/controllers.md."""
    lines = [
        "| plant (rate, free) | controller | settled after | peak | overshoot | noise |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        plant = PLANTS[row["plant"]]
        settled = row["settling_updates"] if row["settling_updates"] is not None else "never"
        lines.append(
            f"| {row['plant']} ({plant.rate}, {plant.free}) | `{row['controller']}` | {settled} "
            f"| {row['peak_over_target']:.2f} | {row['overshoot']:.1%} | {row['rms_error_with_noise']:.2f} |"
        )
    return "\n".join(lines)


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(PLANTS), figsize=(4 * len(PLANTS), 6), sharex=True, squeeze=False)
    for column, (plant_name, plant) in enumerate(PLANTS.items()):
        for name, controller in CONTROLLERS.items():
            kls, coefs = simulate(controller, plant)
            axes[0, column].plot(kls / TARGET, label=name, linewidth=1)
            axes[1, column].plot(coefs, label=name, linewidth=1)
        axes[0, column].axhspan(1 - BAND, 1 + BAND, alpha=0.15)
        axes[0, column].set(title=plant_name, ylim=(0, 4))
        axes[1, column].axhline(plant.coef_at_target, color="black", linewidth=0.5)
        axes[1, column].set(xlabel="update", xlim=(0, 800))
    axes[0, 0].set_ylabel("KL / target")
    axes[1, 0].set_ylabel("coefficient")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(OUT / "settling.png", dpi=110, metadata={"Software": None})


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": "python experiments/controllers.py",
        "target": TARGET,
        "band": BAND,
        "updates": UPDATES,
        "noise": 0.05,
        "jax": jax.__version__,
        "plants": {name: dataclasses.asdict(plant) for name, plant in PLANTS.items()},
        "rows": table(),
    }
    (OUT / "settling.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot()
    print(markdown(result["rows"]))


if __name__ == "__main__":
    main()
