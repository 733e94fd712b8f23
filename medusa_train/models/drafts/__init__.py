"""The table of drafts. docs/development/adding-a-draft.md lists what a new one needs."""

from __future__ import annotations

from medusa_train.models.drafts.amphista import AmphistaDraft
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.drafts.hydra import HydraDraft
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.medusa import MedusaDraft

#: Draft classes by the value of the configuration key `draft`.
DRAFTS: dict[str, type[Draft]] = {
    "medusa": MedusaDraft,
    "hydra": HydraDraft,
    "amphista": AmphistaDraft,
    "kangaroo": KangarooDraft,
    "eagle3": Eagle3Draft,
    "dflash": DFlashDraft,
}


def draft_name(draft: Draft) -> str:
    """Return the value of the configuration key `draft` for this draft."""
    return next(name for name, draft_class in DRAFTS.items() if isinstance(draft, draft_class))
