"""Say what happened to keys of earlier versions, and what to write instead.

A run's own config.yaml may still have them: there they are ignored, and listed as ignored.
"""

from __future__ import annotations

from collections.abc import Collection

#: A key, or a `key: value` of a key that there still is -> what happened to it.
REMOVED_KEYS = {
    "compile: auto": "auto was a guess of the time that compiling saves; set true or false",
    "gpu_kernels": ("no GPU ever ran these kernels; remove it (`compile: true` compiles decoding)"),
    "mode: questions": (
        "the model no longer writes its own prompts; give prompts by seed_dataset (--prompts FILE)"
    ),
    "torch_compile: auto": "auto was never faster in a measurement; set true or false",
}


def explain_removed(name: str, value: object, known: Collection[str]) -> str | None:
    """Return what happened to a key or to its value; None if it is not an old one.

    Args:
        known: the keys of the command.
    """
    if name in known:
        return REMOVED_KEYS.get(f"{name}: {value}")
    return REMOVED_KEYS.get(name)
