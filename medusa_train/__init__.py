"""Train, evaluate and export draft heads for speculative decoding: Medusa, Hydra, Amphista,
Kangaroo, EAGLE-3.

`medusa_train.load` is imported on first use, so that importing the package stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_train.api import load as load

__version__ = "0.3.0.dev0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from medusa_train.api import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
