"""Options and the parts of a run that every recipe has: its processes, its trained model, what its summary says."""

from dataclasses import asdict, dataclass
from typing import Any

from rl_bridge.common.terminal import tell
from rl_bridge.engines.engine import Turns
from rl_bridge.executors.session import current_executor
from rl_bridge.loop.data import Model
from rl_bridge.loop.scored import AdamW, Scored
from rl_bridge.models.export_rehearsal import rehearse_export
from rl_bridge.models.exported_files import export_types
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.placement import workers_left
from rl_bridge.pipelines.training import TrainingOptions, prepare_processes, summary_of


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(TrainingOptions):
    """Options of every recipe, and the arguments that its objects have of these."""

    def begin(self) -> None:
        """Make the processes of the run, and set their threads and seeds."""
        prepare_processes(self, self.start())

    def rehearse(self, model: Model, source: ModelSource | None = None) -> None:
        """Refuse, before a run begins, what could not be exported after it. ``source``: a model's with another head."""
        source = model.source if source is None else source
        rehearse_export(self.trained(source), model.tokenizer, export_types(source, self.export_dtype))

    def adamw(self, updates: int, optimizer: OptimizerConfig | None = None) -> AdamW:
        """The run's optimiser, or another one, with the length of its schedule."""
        config = self.optimizer if optimizer is None else optimizer
        unread = self.unread_of("", config)  # values of the command's own, or of a run file
        values = {name: value for name, value in asdict(config).items() if f".{name}" not in unread}
        return AdamW(**values, total=updates)

    def remark_on_warmup(self, updates: int, part: str = "optimizer", optimizer: OptimizerConfig | None = None) -> None:
        """Say where a run ends before its learning rate is what the options name."""
        config = self.optimizer if optimizer is None else optimizer
        highest = config.highest(updates)
        if updates <= config.warmup and highest < 1:
            tell(
                f"--{part}.warmup {config.warmup} is longer than the run (updates: {updates}): the learning rate "
                f"comes to {highest * config.learning_rate:.3g}, and never to {config.learning_rate:g}"
            )

    def unread(self) -> dict[str, str]:
        """Options that nothing reads beside the others."""
        return super().unread() | self.unread_of("optimizer", self.optimizer)

    @staticmethod
    def unread_of(part: str, optimizer: OptimizerConfig) -> dict[str, str]:
        """The options of an optimiser that its schedule does not read."""
        unread = {f"{part}.final": f"with --{part}.decay constant"} if optimizer.decay == "constant" else {}
        return unread | ({} if optimizer.warmup else {f"{part}.initial": f"without --{part}.warmup"})

    @property
    def workers_apart(self) -> int:
        """Workers in which the trained model has no part."""
        return 0

    def shared(self) -> dict[str, Any]:
        """Arguments of the trained model and of those beside it."""
        return {
            "mesh": self.mesh.of(workers_left(len(current_executor().slots), self.workers_apart)),
            "scoring": self.scoring(),
            "parallel": self.parallel(),
            "turns": Turns() if self.offload == "phases" else None,
        }

    def trained_part(self) -> dict[str, Any]:
        """Arguments of the trained model alone; its export was rehearsed."""
        part = {"lora": self.lora, "freeze": self.freeze, "seed": self.seed}
        return {**part, "export_dtype": self.export_dtype, "rehearsed": True}

    def about(self, trained: Scored, *others: Scored) -> dict[str, Any]:
        """The part of a summary that every run has."""
        notes = dict.fromkeys(note for scored in (*others, trained) for note in scored.engines.notes)
        return summary_of(self, trained.engines.source, list(notes))
