"""Load and compile a model that generates answers on this machine, and create its engine.

A `LocalModel` can be sent to other processes. It imports torch only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from medusa_train.checkpoint.load_model import LoadedModel
    from medusa_train.checkpoint.resolve import ModelPaths
    from medusa_train.selfdistill.hf_engine import HFEngine

TIMED_PROMPT = 100  # tokens of the prompts with which a step is timed


@dataclass(frozen=True)
class LocalModel:
    """The settings with which a process loads a model and answers requests.

    Attributes:
        paths: of the backbone and its heads.
        dtype: of the weights.
        options: arguments of `HFEngine` except the model and the batch size.
        compiled: compile the decoding passes; "auto": if that is expected to save time.
        tokens: maximum number to generate; "auto" expects half of them, since most answers end before their limit.
    """

    paths: ModelPaths
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool | Literal["auto"] = False
    tokens: int = 0

    def load(self) -> LoadedModel:
        """Load the backbone and its heads. Raises BackboneError, CheckpointError."""
        from medusa_train.checkpoint.load_model import load_with_draft

        # float32 answers are reproducible on other machines only without prepacked weights
        return load_with_draft(self.paths, self.dtype, prepack=self.dtype != "float32")

    def decide_compile(self, loaded: LoadedModel, batch_size: int, tokens: int) -> tuple[bool, str | None]:
        """Decide whether to compile before `tokens` are generated; also return a line with the reason, or None.

        Single rows in float32 are not compiled by "auto": their answers are the same on other machines, and compiled
        passes round differently.
        """
        import torch

        from medusa_train.checkpoint.choose_compile import Outlook, compile_obstacle, compile_seconds
        from medusa_train.inference.batch import plain_step_seconds

        if self.compiled != "auto":
            return self.compiled, None
        backbone = loaded.backbone
        if batch_size == 1 and backbone.dtype == torch.float32:
            return False, None
        steps = tokens // 2 // batch_size
        step = plain_step_seconds(backbone, [0] * TIMED_PROMPT, batch_size)
        trees = loaded.draft is not None
        outlook = Outlook(steps, step, compile_seconds=compile_seconds(backbone, trees=trees))
        obstacle = compile_obstacle(backbone) if outlook.repaid else None
        wanted = outlook.repaid and obstacle is None
        return wanted, f"compile: {'yes' if wanted else 'no'}, {obstacle or outlook}"

    def compile(self, loaded: LoadedModel, batch_size: int, note: Callable[[str], None]) -> None:
        """Compile the decoding passes. With "auto", a failure is passed to `note`, and decoding continues without.

        Raises:
            BackboneError: the passes can't be compiled, although the user required it.
        """
        from medusa_train.checkpoint.choose_compile import compile_or_report
        from medusa_train.checkpoint.load_model import compile_backbone

        trees = loaded.draft is not None
        if self.compiled == "auto":
            compile_or_report(loaded.backbone, self.paths, note, rows=batch_size, trees=trees)
        else:
            compile_backbone(loaded.backbone, self.paths, rows=batch_size, trees=trees)

    def engine(self, loaded: LoadedModel, batch_size: int) -> HFEngine:
        """Return the engine of a loaded model."""
        from medusa_train.selfdistill.hf_engine import HFEngine

        return HFEngine(
            loaded.backbone, batch_size=batch_size, draft=loaded.draft, tree=loaded.tree, **dict(self.options)
        )

    def open(self, batch_size: int, note: Callable[[str], None]) -> HFEngine:
        """Load the model in this process, and compile it where wanted; `note` receives that decision."""
        loaded = self.load()
        wanted, line = self.decide_compile(loaded, batch_size, self.tokens)
        if line is not None:
            note(line)
        if wanted:
            self.compile(loaded, batch_size, note)
        return self.engine(loaded, batch_size)
