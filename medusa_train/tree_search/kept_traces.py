"""Keep the traces that a tree was fitted to next to tree.json, so that later measurements need not
generate the answers again.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.load_model import added_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, find_heads
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.io import parse_json, replace_file
from medusa_train.models.model_files import model_directory
from medusa_train.tree_search.fit import Trace
from medusa_train.tree_search.traces import TracedAnswers

#: Everything that traces depend on, see `weights_key`.
Key = dict[str, Any]


def weights_key(paths: ModelPaths, settings: DecodingSettings) -> Key:
    """Return what traces depend on: hashes of heads, adapter and target model, the quantization of
    the target model's weights, whether the adapter is merged, and the stop tokens.

    The target model's dtype and compilation are left out: they change a token's rank only if logits
    nearly tie.
    """
    target_model = model_directory(paths.target_model)
    weights = [*target_model.glob("config.json"), *target_model.glob("*.safetensors")]
    weights += target_model.glob("*.bin")
    adapter: list[Path] = []
    if paths.adapter is not None:
        adapter += paths.adapter.glob("*")
    heads: str | None = None
    if paths.heads is not None:
        heads = digest_files(find_heads(paths.heads).files)
    key: Key = {
        "heads": heads,
        "adapter": digest_files(adapter),
        "backbone": digest_files(weights),
        "quantization": settings.quantization,
        "merged": settings.merged,
    }
    added = added_stop_tokens(paths)
    if added:  # no entry without any, as in files of earlier versions, which did not stop at these
        key["stop_tokens"] = list(added)
    return key


def save_traces(path: Path, traced: TracedAnswers, key: Key) -> None:
    """Write traces as a compressed NumPy archive, a few KB per 1,000 tokens of five heads."""
    traces = traced.traces
    arrays: dict[str, Any] = {
        "key": json.dumps(key),
        "prompt": np.array(traced.prompt, np.int32),
        "answers": np.array([len(conversation) for conversation in traced.conversations], np.int32),
        "tokens": np.array([len(trace.ranks) for trace in traces], np.int32),
        "ranks": np.concatenate([np.array(trace.ranks, np.int8) for trace in traces]),
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    replace_file(path, write)


def load_traces(path: Path, key: Key) -> TracedAnswers | None:
    """Read the traces; None if there are none, they were saved with a different key, or the file is
    damaged.
    """
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            if parse_json(str(arrays["key"])) != key:
                return None
            ranks = arrays["ranks"]  # int8 [all tokens, K]
            tokens = arrays["tokens"]  # number of tokens of each answer
            answers = arrays["answers"]  # number of answers of each conversation
            prompt = arrays["prompt"].tolist()
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        NotImplementedError,
        zlib.error,
        zipfile.BadZipFile,
    ):
        return None
    traces: list[Trace] = []
    for start, end in pairwise([0, *np.cumsum(tokens).tolist()]):
        traces.append(Trace(ranks[start:end].tolist()))
    conversations: list[list[Trace]] = []
    for start, end in pairwise([0, *np.cumsum(answers).tolist()]):
        conversations.append(traces[start:end])
    return TracedAnswers(conversations, prompt)
