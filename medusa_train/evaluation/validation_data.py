"""Read the validation conversations of a training run, for measuring on text that it was not trained on."""

from __future__ import annotations

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import EncodedDataset, load_datasets
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import MedusaError


def run_config(paths: ModelPaths) -> TrainConfig | None:
    """Return the configuration of the run that `paths` belong to; None if it is no run, or its configuration broken."""
    path = paths.home / "config.yaml"
    if not path.is_file():
        return None
    try:
        return load_config(TrainConfig, path, [])
    except MedusaError:
        return None


def validation_conversations(cfg: TrainConfig, chat: ChatEncoder) -> tuple[EncodedDataset, bool] | None:
    """Return the validation split of a run, with only the assistant's turns supervised.

    Returns:
        The conversations (the training split if there is no validation split) and whether they were held out of
        training; None if the data are gone.
    """
    try:
        answers_only = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        train, validation = load_datasets(cfg.model_copy(update=answers_only), chat)
    except MedusaError:
        return None
    return (validation, True) if len(validation) else (train, False)
