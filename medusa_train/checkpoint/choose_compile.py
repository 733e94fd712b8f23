"""Decide whether to compile the decoding passes (`compile: auto`): where the steps ahead repay the compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from medusa_train.checkpoint.load_model import compile_backbone
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import has_compiler
from medusa_train.models.graphs import graph_obstacle

#: Share of a plain step that compilation is assumed to save. The saving depends on the model and the machine, and is
#: only known once the passes are compiled.
SAVING = 0.25
COMPILE_SECONDS = 60.0  # assumed for small models
LAYER_SECONDS = 5.0  # and per layer and program for larger ones: 145 s for one of 30 layers on two cores
FACTOR = 2.0  # by which the saving must exceed the cost


@dataclass(frozen=True)
class Outlook:
    """What compiling would save and cost.

    Attributes:
        steps: plain steps ahead. step_seconds: measured time of one without compilation.
        refit_steps: plain steps that fitting the tree again would take if the passes are compiled; negative if it
            would be fitted again without compilation only.
        compile_seconds: see `compile_seconds`.
    """

    steps: int
    step_seconds: float
    refit_steps: int = 0
    compile_seconds: float = COMPILE_SECONDS

    @property
    def saved_seconds(self) -> float:
        """Time saved by compiled steps."""
        return SAVING * self.steps * self.step_seconds

    @property
    def cost_seconds(self) -> float:
        """Time taken by compilation and by fitting the tree to compiled passes."""
        return self.compile_seconds + self.refit_steps * self.step_seconds

    @property
    def repaid(self) -> bool:
        """Whether the saving clearly exceeds the cost."""
        return self.saved_seconds > FACTOR * self.cost_seconds

    def __str__(self) -> str:
        tree = " and fitting the tree again" if self.refit_steps > 0 else ""
        relation = "more" if self.repaid else "not more"
        return (
            f"{self.steps:,} steps of {1000 * self.step_seconds:.1f} ms are expected, of which it may save "
            f"{self.saved_seconds:.0f} s, {relation} than {FACTOR:g} times the {self.cost_seconds:.0f} s of "
            f"compilation{tree}"
        )


def compile_seconds(backbone: Backbone, *, trees: bool) -> float:
    """Estimate the time that compilation takes: one program for plain steps, and one for trees."""
    return max(COMPILE_SECONDS, LAYER_SECONDS * backbone.num_layers * (2 if trees else 1))


def compile_obstacle(backbone: Backbone) -> str | None:
    """Return why passes can't be compiled here; None if they can."""
    if backbone.device.type == "cuda" and graph_obstacle(backbone.model) is None:
        return None  # CUDA graphs do without torch.compile
    if backbone.compile_obstacle is not None:
        return f"the model {backbone.compile_obstacle}"
    if not has_compiler(backbone.device):
        return "there is no C++ compiler (on a GPU: no Triton)"
    return None


def compile_or_report(
    backbone: Backbone, paths: ModelPaths, report: Callable[[str], None], *, rows: int = 1, trees: bool = True
) -> None:
    """Compile the decoding passes, see `compile_backbone`; a failure is reported, and decoding goes on without."""
    try:
        compile_backbone(backbone, paths, rows=rows, trees=trees)
    except BackboneError as error:
        report(f"{error}\ndecoding without compiled passes")
