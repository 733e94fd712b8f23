"""Traces are read as they were written, and only for the weights that they are of."""

from dataclasses import replace
from pathlib import Path

import pytest

from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.tree_search import kept_traces
from medusa_train.tree_search.kept_traces import load_traces, save_traces, weights_key
from medusa_train.tree_search.traces import trace_conversations
from tests.evaluation.tiny_model import write_run, write_target_model
from tests.families import random_target_model
from tests.tree_search.test_traces import noisy_heads

SETTINGS = DecodingSettings("float32", None, True, False, "cpu", "A CPU", 4)


def test_traces_are_read_as_they_were_written(tmp_path: Path) -> None:
    target_model, path = random_target_model("llama"), tmp_path / "tree_traces.npz"
    traced = trace_conversations(
        target_model, noisy_heads(target_model), [[[3, 1, 4], [9]], [[2, 6, 5]]], max_new_tokens=20
    )
    assert [len(one) for one in traced.conversations] == [2, 1]
    save_traces(path, traced, {"heads": "a"})
    assert load_traces(path, {"heads": "a"}) == traced
    assert load_traces(path, {"heads": "b"}) is None
    path.write_bytes(path.read_bytes()[:50])
    assert load_traces(path, {}) is None
    assert load_traces(tmp_path / "none.npz", {}) is None


def test_the_key_changes_with_the_weights_and_not_with_dtype_or_device(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_target_model(tmp_path / "backbone"))
    paths = resolve_model(str(run), None, None)
    keys = [weights_key(paths, SETTINGS)]
    assert (
        weights_key(
            paths, replace(SETTINGS, dtype="bfloat16", device="cuda", compiled=True, graphs=True)
        )
        == keys[0]
    )
    keys += [
        weights_key(paths, replace(SETTINGS, merged=False)),
        weights_key(paths, replace(SETTINGS, quantization="nf4")),
    ]

    def change(path: Path, at: int) -> ModelPaths:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        return paths

    keys.append(
        weights_key(change(next((tmp_path / "backbone").glob("*.safetensors")), -1), SETTINGS)
    )
    keys.append(weights_key(change(next((run / "heads").glob("*.safetensors")), -1), SETTINGS))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"trained")
    with_adapter = replace(paths, adapter=adapter)
    keys.append(weights_key(with_adapter, SETTINGS))
    change(adapter / "adapter_model.safetensors", -1)
    keys.append(weights_key(with_adapter, SETTINGS))
    assert all(one not in keys[:i] for i, one in enumerate(keys))
    # not in the hub's cache
    assert weights_key(replace(paths, target_model="nobody/nothing"), SETTINGS) not in keys


def test_the_key_changes_with_the_tokens_that_end_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", write_target_model(tmp_path / "base_model"))
    paths = resolve_model(str(run), None, None)
    monkeypatch.setattr(kept_traces, "added_stop_tokens", lambda paths: ())
    key = weights_key(paths, SETTINGS)
    monkeypatch.setattr(kept_traces, "added_stop_tokens", lambda paths: (7,))
    assert weights_key(paths, SETTINGS) != key
