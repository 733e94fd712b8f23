"""Load a trained model for use from Python: `medusa_train.load`.

Imports torch only once the paths are resolved: a wrong path is refused at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.checkpoint.resolve import ModelPaths, resolve_model

if TYPE_CHECKING:
    from medusa_train.inference.model import Model


def load(
    model: str | Path | None = None,
    *,
    base_model: str | Path | None = None,
    tree: str | Path | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
) -> Model:
    """Load a trained model, or a backbone alone.

    Args:
        model: run directory or directory of heads; defaults to the newest run under runs/.
        base_model: directory or Hugging Face hub name of the backbone; defaults to the one that the heads were trained
            with. Given without `model`, the backbone decodes plainly, without heads.
        tree: tree file; defaults to tree.json beside the heads.
        dtype: "float32", "bfloat16" or "float16"; "auto": bfloat16 where the device has fast bfloat16 matrix
            products, else float16 on a GPU and float32 on a CPU.
        chat_template: name of a chat template; defaults to the run's, else the tokenizer's.
        trust_remote_code: allow Python code that the backbone's repository ships.
        compile: compile the decoding passes with torch.compile: up to a minute more to start, faster steps.

    Raises:
        CheckpointError: no such run or heads, or files that cannot be read.
        BackboneError: the backbone cannot be found or loaded.
    """
    paths = resolve_model(
        None if model is None else str(model),
        None if base_model is None else str(base_model),
        None if tree is None else Path(tree),
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    return open_model(paths, dtype, compiled=compile)


def open_model(paths: ModelPaths, dtype: str, *, compiled: bool = False) -> Model:
    """Load the model at `paths` (from `resolve_model`). Raises as `load` does."""
    from medusa_train.checkpoint.load_model import load_with_draft
    from medusa_train.inference.model import Model

    loaded = load_with_draft(paths, dtype, compiled=compiled)
    return Model(loaded.backbone, loaded.draft, loaded.tree, paths.chat_template)
