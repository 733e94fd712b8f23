"""Which attention a run trains with, decided in one place and said in one line. Knows no data and no recipe."""

from __future__ import annotations

from typing import Literal

from transformers.utils import is_flash_attn_2_available

from medusa_train.errors import BackboneError
from medusa_train.models.attention import FLASH, flash_obstacle
from medusa_train.models.backbone import Backbone


def choose_attention(backbone: Backbone, wanted: bool | Literal["auto"], *, packed: bool) -> str:
    """Let `backbone` keep packed conversations apart in the fastest way that is certain to; say in one line which.

    Rows of one conversation each need no mask: torch's sdpa has a flash kernel of its own for them. Packed ones do,
    and a mask bars sdpa from that kernel; flash-attn's varlen kernel takes their bounds instead.

    Args:
        backbone: as it was loaded, before any of it is converted for training.
        wanted: the key `flash_attention`; asked for where it can't be had, the line says why.
        packed: whether rows hold several conversations.
    """
    plain = backbone.attention
    if not packed:
        return f"attention: torch's {plain}, causal (rows of one conversation need no mask)"
    obstacle: str | None = "flash_attention: false"
    if wanted:
        obstacle = flash_obstacle(
            backbone.device.type,
            backbone.dtype,
            capped=plain == "eager",
            known=bool(getattr(backbone.model, "_supports_flash_attn", False)),
            installed=is_flash_attn_2_available(),
        )
    if obstacle is None:
        try:
            backbone.use_varlen(FLASH)
            return "attention: flash-attn's varlen kernel, told where each conversation ends"
        except (BackboneError, ImportError, RuntimeError, ValueError) as error:
            obstacle = str(error).partition("\n")[0]
    return f"attention: torch's {plain} with a block-diagonal mask for packed rows ({obstacle})"
