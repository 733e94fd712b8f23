"""The conversations that a run held out, for measuring on text that it did not learn. Knows no model."""

from __future__ import annotations

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import EncodedDataset, load_datasets
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import MedusaError


def run_config(paths: ModelPaths) -> TrainConfig | None:
    """The configuration of the run that `paths` lead to; None where it is no run, or its configuration is broken."""
    path = paths.home / "config.yaml"
    if not path.is_file():
        return None
    try:
        return load_config(TrainConfig, path, [])
    except MedusaError:
        return None


def validation_conversations(cfg: TrainConfig, chat: ChatEncoder) -> tuple[EncodedDataset, bool] | None:
    """What a run held out, with the assistant's words alone marked; all of its data where it held out nothing.

    Returns:
        The conversations, and whether the run did not learn them; None where its data are not to be had any more.
    """
    try:
        answers = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        train, held = load_datasets(cfg.model_copy(update=answers), chat)
    except MedusaError:
        return None
    return (held, True) if len(held) else (train, False)
