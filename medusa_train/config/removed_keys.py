"""Say what happened to keys and options of earlier versions, and what to write instead.

A run's own config.yaml may still have them: there they are ignored, and listed as ignored.
"""

from __future__ import annotations

from collections.abc import Collection

_SHARDS = (
    "the output is no longer divided; serve several GPUs with vLLM, and list them as server_url"
)

#: Removed key, removed value (`key: value`) of a remaining key, or removed option -> what happened.
REMOVED_KEYS = {
    "--dry-run": "there is no preview; look at a few answers with limit=3",
    "--hostfile": (
        "start torchrun on each machine, srun once, or DeepSpeed's launcher"
        " (docs/how-to/several-gpus.md)"
    ),
    "--master-port": "--num-gpus takes a free port; torchrun has --rdzv-endpoint",
    "--merge": _SHARDS,
    "--shard": _SHARDS,
    "compile: auto": "auto was a guess of the time that compiling saves; set true or false",
    "gpu_kernels": ("no GPU ever ran these kernels; remove it (`compile: true` compiles decoding)"),
    "mode: questions": (
        "the model no longer writes its own prompts; give prompts by seed_dataset (--prompts FILE)"
    ),
    "torch_compile: auto": "auto was never faster in a measurement; set true or false",
}


def explain_removed(name: str, value: object, command_keys: Collection[str]) -> str | None:
    """Return what happened to a key or to its value; None if neither was removed.

    Args:
        command_keys: the keys of the command.
    """
    if name in command_keys:
        return REMOVED_KEYS.get(f"{name}: {value}")
    return REMOVED_KEYS.get(name)
