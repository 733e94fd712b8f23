"""Files of a model that were not copied or downloaded completely."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.io import describe_size
from medusa_train.models import loading, precision
from medusa_train.models.loading import (
    auto_dtype_that_fits,
    load_target_model,
    loading_options,
    resolve_target_model,
)
from medusa_train.models.lora import Adapter, LoraSpec
from tests.evaluation.tiny_model import write_target_model
from tests.families import random_target_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a single file of weights."""
    return write_target_model(tmp_path_factory.mktemp("model") / "whole")


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("left", [0, 60, -1])
def test_torn_weights_are_named(whole: Path, tmp_path: Path, left: int) -> None:
    """Nothing, a part of the header, and all but a byte of the tensors."""
    directory = tmp_path / "torn"
    shutil.copytree(whole, directory)
    truncate(directory / WEIGHTS, left)
    with pytest.raises(
        TargetModelError, match=rf"torn/{WEIGHTS}: incomplete or damaged .*download it again"
    ):
        load_target_model(str(directory))


@pytest.mark.parametrize("left", [0, 60, -1000])
def test_torn_pickled_weights_are_named(whole: Path, tmp_path: Path, left: int) -> None:
    directory = tmp_path / "torn"
    shutil.copytree(whole, directory)
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()
    assert load_target_model(str(directory)).vocab_size == 300
    truncate(directory / "pytorch_model.bin", left)
    with pytest.raises(
        TargetModelError, match=r"torn/pytorch_model\.bin: incomplete or damaged \(.{4,}\); copy"
    ):
        load_target_model(str(directory))


def test_other_errors_of_torch_are_not_taken_for_damage(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **keys: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load_target_model(str(whole))


def test_weights_are_read_straight_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the host, eight processes would hold eight copies of the model there; ZeRO-3 places
    its own parts.
    """
    cuda = torch.device("cuda", 3)
    assert loading_options(None, torch.bfloat16, cuda) == {"device_map": {"": cuda}}
    assert loading_options(None, torch.bfloat16, torch.device("cpu")) == {}
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: True)
    assert loading_options(None, torch.bfloat16, cuda) == {}


def test_of_several_files_the_torn_one_is_named(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "sharded"
    target_model = load_target_model(str(whole))
    shutil.copytree(whole, directory, ignore=shutil.ignore_patterns(WEIGHTS))
    target_model.model.save_pretrained(directory, max_shard_size="100KB")
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert load_target_model(str(directory)).vocab_size == target_model.vocab_size
    truncate(shards[1], -40)
    with pytest.raises(TargetModelError, match=f"sharded/{shards[1].name}: incomplete or damaged"):
        load_target_model(str(directory))


def test_torn_weights_in_the_hubs_cache_are_named(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of the cache: snapshots below the name, with the revision of `main` in refs."""
    cached = tmp_path / "models--somebody--some-model"
    shutil.copytree(whole, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    for module in (
        "huggingface_hub.constants.HF_HUB_CACHE",
        "huggingface_hub.file_download.HF_HUB_CACHE",
    ):
        monkeypatch.setattr(module, str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_target_model("somebody/some-model").name == "somebody/some-model"
    truncate(cached / "snapshots" / "abc" / WEIGHTS, 60)
    with pytest.raises(TargetModelError, match=rf"snapshots/abc/{WEIGHTS}: incomplete or damaged"):
        load_target_model("somebody/some-model")


def test_a_torn_adapter_is_named(tmp_path: Path) -> None:
    Adapter.attach(random_target_model("llama", dtype=torch.float32), LoraSpec(r=2)).save(
        tmp_path / "adapter"
    )
    truncate(tmp_path / "adapter" / "adapter_model.safetensors", 60)
    with pytest.raises(
        CheckpointError, match=r"adapter/adapter_model\.safetensors: cannot be read as safetensors"
    ):
        Adapter.load(random_target_model("llama", dtype=torch.float32), tmp_path / "adapter")


def test_every_loaded_model_is_probed(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "medusa_train.models.loading.check_model", Mock(side_effect=TargetModelError("probed"))
    )
    with pytest.raises(TargetModelError, match="probed"):
        load_target_model(str(whole))


def test_code_of_a_repository_needs_the_user_and_the_message_names_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    for reference, named in (("evil.Evil", str(tmp_path)), ("own/er--evil.Evil", "own/er")):
        config = {"model_type": "evil", "auto_map": {"AutoConfig": reference}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(TargetModelError) as error:
            resolve_target_model(str(tmp_path))
        assert f"Python code of the repository {named}" in str(error.value)
        assert "trust_remote_code=true" in str(error.value)
        assert not ran.exists()


def test_a_page_in_place_of_a_config_is_not_called_a_missing_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a proxy answers that wants a login."""
    monkeypatch.setattr(
        loading.AutoConfig, "from_pretrained", Mock(side_effect=OSError("not valid JSON\nmore"))
    )
    monkeypatch.setattr("medusa_train.models.model_files.hub_is_unreachable", lambda: False)
    with pytest.raises(TargetModelError, match=r"a proxy answer in its place\? \(not valid JSON\)"):
        resolve_target_model("some/model")


@pytest.mark.parametrize(
    "index", ["[1]", '{"weight_map": [1]}', '{"weight_map": {"a": "absent"}, "metadata": {}}']
)
def test_a_damaged_index_of_weights_is_named(tmp_path: Path, index: str) -> None:
    write_target_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        TargetModelError, match=r"model\.safetensors\.index\.json is damaged, or names"
    ):
        load_target_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b'{"eos_token_id": 2', b"\xff\xfe{}", b"[2]"])
def test_a_damaged_generation_config_is_not_taken_for_none(
    whole: Path, tmp_path: Path, content: bytes
) -> None:
    """transformers would take the end of answers from config.json in silence."""
    directory = tmp_path / "torn"
    shutil.copytree(whole, directory)
    path = directory / "generation_config.json"
    path.write_bytes(content)
    with pytest.raises(
        TargetModelError, match=r"torn/generation_config\.json is not a JSON object"
    ):
        resolve_target_model(str(directory))
    path.unlink()
    resolve_target_model(str(directory))


@pytest.mark.parametrize(
    ("free_per_weight", "quantization", "dtype"),
    [
        (4, None, "float32"),
        (3.99, None, "bfloat16"),
        (3.99, "nf4", "float32"),  # their size does not depend on the dtype
        (1.99, None, "float32"),  # no dtype helps
    ],
)
def test_auto_is_bfloat16_on_a_slow_cpu_only_if_the_weights_do_not_fit_in_float32(
    free_per_weight: float, quantization: str | None, dtype: str, whole: Path, monkeypatch
) -> None:
    weights = sum(tensor.numel() for tensor in load_file(whole / "model.safetensors").values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(precision, "free_memory", lambda device: free_per_weight * weights)
    lines: list[str] = []
    assert auto_dtype_that_fits(str(whole), lines.append, quantization=quantization) == dtype
    reason = f"since the weights need {describe_size(4 * weights)} in float32, more than is free"
    assert [reason in line for line in lines] == [True] * (dtype == "bfloat16")


def test_on_a_cpu_with_fast_bfloat16_auto_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: True)
    assert auto_dtype_that_fits("no/such/model", pytest.fail) == "bfloat16"
