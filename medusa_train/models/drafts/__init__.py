"""The drafts: who guesses the next tokens; each in a file of its own behind one interface."""

from __future__ import annotations

from medusa_train.models.drafts.amphista import AmphistaDraft
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.hydra import HydraDraft
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.medusa import MedusaDraft

DRAFTS: dict[str, type[Draft]] = {
    "medusa": MedusaDraft,
    "hydra": HydraDraft,
    "amphista": AmphistaDraft,
    "kangaroo": KangarooDraft,
}


def draft_name(draft: Draft) -> str:
    """The value of the key `draft` that made it."""
    return next(name for name, kind in DRAFTS.items() if isinstance(draft, kind))
