"""Heads with a Markov bias on disk: saved, read back, and files that do not fit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_train.checkpoint.heads import load_draft, save_draft
from medusa_train.checkpoint.medusa_layouts import from_files, names_in_files
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.medusa import MedusaDraft
from tests.families import random_target_model


def draft() -> MedusaDraft:
    return MedusaDraft.from_target_model(
        random_target_model("llama", dtype=torch.float32), 3, markov_rank=4
    )


def tensors(**changed: Tensor | None) -> dict[str, Tensor]:
    """A file's tensors, some of them changed or removed; `__` stands for a point."""
    names = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    whole = {**names_in_files(draft().state_dict(), 1), **names}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"markov__embedding__weight": None}, r"incomplete, markov\.embedding\.weight missing"),
        ({"markov__output__weight": None}, r"incomplete, markov\.output\.weight missing"),
        (
            {"markov__output__bias": torch.zeros(61)},
            r"markov\.output\.bias is not a weight of Medusa heads",
        ),
        (
            {"markov__output__weight": torch.zeros(61, 5)},
            r"markov\.output\.weight is \[61, 5\], expected \[61, 4\]",
        ),
        (
            {"markov__output__weight": torch.zeros(61)},
            r"markov\.output\.weight is \[61\], expected \[61, 4\]",
        ),
        (
            {"markov__embedding__weight": torch.zeros(60, 4)},
            r"\.embedding\.weight is \[60, 4\], expected \[61, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor | None], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_files(tensors(**changed))


def test_heads_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Also where they share lm_head, so that only the bias shows it."""
    original = MedusaDraft(32, 90, 2, shared=random_target_model("llama").lm_head(), markov_rank=4)
    with pytest.raises(CheckpointError, match="a vocabulary of 90"):
        load_draft(save_draft(original, tmp_path, "m"), random_target_model("llama"))
