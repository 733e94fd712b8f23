"""Keep traces beside tree.json, so that a tree for another device, dtype or compilation needs no answers again."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.checkpoint.resolve import ModelPaths, heads_files
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.io import replace_file
from medusa_train.models.loading import model_directory
from medusa_train.tree_search.traces import Trace, TracedAnswers

#: Of a file of weights this many blocks are read, spread over it: a whole backbone takes minutes from a slow disk.
BLOCKS, BLOCK_BYTES = 64, 1 << 16

Key = dict[str, Any]


def weights_key(paths: ModelPaths, settings: DecodingSettings) -> Key:
    """Return what traces depend on: heads, adapter and backbone by hash, and the form of the backbone's weights.

    Its dtype and compilation change a guess's rank only where logits nearly tie.
    """
    backbone = model_directory(paths.base_model)
    adapter = () if paths.adapter is None else paths.adapter.glob("*")
    return {
        "heads": None if paths.heads is None else _digest(heads_files(paths.heads)),
        "adapter": _digest(adapter),
        "backbone": _digest([*backbone.glob("config.json"), *backbone.glob("*.safetensors"), *backbone.glob("*.bin")]),
        "quantization": settings.quantization,
        "merged": settings.merged,
    }


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}{size}".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * size // BLOCKS)
                digest.update(file.read(min(BLOCK_BYTES, -(-size // BLOCKS))))
    return digest.hexdigest()


def save_traces(path: Path, traced: TracedAnswers, key: Key) -> None:
    """Write traces as a compressed NumPy archive, about 50 KB per 1,000 tokens of five heads."""
    traces = traced.traces
    arrays: dict[str, Any] = {
        "key": json.dumps(key),
        "prompt": np.array(traced.prompt, np.int32),
        "answers": np.array([len(conversation) for conversation in traced.conversations], np.int32),
        "tokens": np.array([len(trace.ranks) for trace in traces], np.int32),
        "ranks": np.concatenate([np.array(trace.ranks, np.int8) for trace in traces]),
    }
    log_probs = [trace.log_probs for trace in traces if trace.log_probs is not None]
    if len(log_probs) == len(traces):
        arrays["log_probs"] = np.concatenate(log_probs).astype(np.float16)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    replace_file(path, write)


def load_traces(path: Path, key: Key) -> TracedAnswers | None:
    """Read the traces that were written with an equal key; None if there are none, or the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            if json.loads(str(arrays["key"])) != key:
                return None
            ranks, tokens, answers = arrays["ranks"], arrays["tokens"], arrays["answers"]
            log_probs = arrays["log_probs"].astype(np.float32) if "log_probs" in arrays else None
            prompt = arrays["prompt"].tolist()
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    heads, traces = ranks.shape[1], []
    for start, end in pairwise([0, *np.cumsum(tokens).tolist()]):
        targets = [min(heads, end - 1 - position) for position in range(start, end)]
        traces.append(Trace(ranks[start:end].tolist(), targets, None if log_probs is None else log_probs[start:end]))
    return TracedAnswers([traces[start:end] for start, end in pairwise([0, *np.cumsum(answers).tolist()])], prompt)
