"""The settings of a target model with their record in tree.json."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from medusa_train.errors import CheckpointError
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.models.loading import loaded_quantization
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.families import random_target_model


def test_the_form_of_a_target_model_on_this_machine() -> None:
    form = DecodingSettings.of(random_target_model("llama", dtype=torch.bfloat16))
    assert (form.dtype, form.quantization, form.merged, form.compiled) == (
        "bfloat16",
        None,
        True,
        False,
    )
    assert form.device == "cpu"
    assert form.device_name
    assert form.threads == torch.get_num_threads()


def test_an_adapter_beside_the_weights_is_another_form_until_it_is_merged() -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    plain = DecodingSettings.of(target_model)
    adapter = Adapter.attach(target_model, LoraSpec(r=2))
    assert DecodingSettings.of(target_model) == replace(plain, merged=False)
    adapter.merge()
    assert DecodingSettings.of(target_model) == plain


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_names_of_quantizations(config: dict[str, object], name: str) -> None:
    model = SimpleNamespace(
        is_quantized=True, config=SimpleNamespace(quantization_config=SimpleNamespace(**config))
    )
    assert loaded_quantization(model) == name
    model.is_quantized = False
    assert loaded_quantization(model) is None


def test_tree_json_records_the_form(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    form = DecodingSettings("float32", None, True, False, "cpu", "A CPU", 4)
    Tree.chain(2).save(path, **form.record())
    assert Tree.load(path) == Tree.chain(2)
    assert DecodingSettings.load(path) == form
    other = DecodingSettings("bfloat16", "nf4", False, False, "cuda", "A GPU", None)
    assert form.differences(form) == []
    assert other.differences(form) == [
        "dtype float32, now bfloat16",
        "quantization none, now nf4",
        "merged yes, now no",
        "device cpu, now cuda",
        "device name A CPU, now A GPU",
        "threads 4, now none",
    ]


def test_older_trees_on_a_gpu_were_fitted_to_graphs_where_they_say_compiled(tmp_path: Path) -> None:
    path, settings = (
        tmp_path / "tree.json",
        DecodingSettings("float16", None, True, True, "cuda", "A GPU", None),
    )
    record = settings.record()
    del record["form"]["graphs"]
    Tree.chain(2).save(path, **record)
    assert DecodingSettings.load(path) == replace(settings, graphs=True)


@pytest.mark.parametrize(
    "content", [[[0]], {"medusa_choices": [[0]]}, {"medusa_choices": [[0]], "form": {"dtype": "x"}}]
)
def test_a_tree_without_a_whole_record_has_no_known_form(tmp_path: Path, content: object) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert DecodingSettings.load(path) is None


def test_a_damaged_tree_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tree\.json: not a tree file"):
        DecodingSettings.load(tmp_path / "tree.json")
