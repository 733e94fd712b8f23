"""Directories of heads: bit-exact round trips, other people's files, hostile ones."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.checkpoint.heads import (
    HEADS_CONFIG,
    PICKLED,
    SAFETENSORS,
    load_draft,
    read_draft,
    read_heads,
    save_draft,
    write_heads,
)
from medusa_train.checkpoint.medusa_layouts import names_in_files
from medusa_train.checkpoint.resolve import find_heads
from medusa_train.errors import CheckpointError
from medusa_train.io import warn_once
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from tests.checkpoint.others import (
    TARGET_MODEL,
    reference_tensors,
    vllm_config,
    vllm_tensors,
    write,
)
from tests.checkpoint.test_vllm_layout import same
from tests.families import random_target_model
from tests.full_disk import full_disk


@pytest.fixture(scope="module")
def target_model() -> TargetModel:
    return random_target_model("llama", dtype=torch.float32)


def test_a_config_that_is_no_mapping_is_an_error(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "draft.safetensors")
    (tmp_path / HEADS_CONFIG).write_text('["eagle3"]')
    with pytest.raises(CheckpointError, match=f"{HEADS_CONFIG}: expected a mapping of keys"):
        read_draft(tmp_path, "eagle3")


KEPT = torch.tensor([40, 3, 9, 21, 60, 5, 33, 0])
REDUCED: dict[str, Any] = {"vocab_size": 8, "token_map": KEPT}
FORMS: dict[str, dict[str, Any]] = {
    "one block": {},
    "two blocks": {"num_layers": 2},
    "shared": {"share_lm_head": True},
    "reduced": REDUCED,
    "reduced, shared": {**REDUCED, "share_lm_head": True},
    "markov": {"markov_rank": 4},
    "markov, reduced, shared": {**REDUCED, "markov_rank": 4, "share_lm_head": True},
}


def trained(
    target_model: TargetModel,
    num_heads: int = 3,
    num_layers: int = 1,
    seed: int = 0,
    **settings: Any,
) -> MedusaDraft:
    """Heads that are no longer what they started as."""
    draft = MedusaDraft.from_target_model(target_model, num_heads, num_layers, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return draft


def assert_same(left: Draft, right: Draft) -> None:
    assert left.settings == right.settings
    assert same(left.state_dict(), right.state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "llama-bias-tied"]
)  # with a soft cap, with a bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(
    tmp_path: Path, family: str, form: str, dtype: torch.dtype
) -> None:
    target_model = random_target_model(family, dtype=dtype)
    draft = trained(target_model, **FORMS[form])
    save_draft(draft, tmp_path, "some/model")
    loaded = load_draft(tmp_path, target_model)
    assert isinstance(loaded, MedusaDraft)
    assert_same(loaded, draft)
    assert (loaded.softcap, loaded.scale) == (draft.softcap, draft.scale)
    states = torch.randn(4, target_model.hidden_size, dtype=dtype)
    if "markov" not in form:
        logits = [each.lm_head(3).logits(each.head_state(states, 3)) for each in (loaded, draft)]
        assert torch.equal(*logits)
    config, names = (
        json.loads((tmp_path / HEADS_CONFIG).read_text()),
        set(load_file(tmp_path / SAFETENSORS)),
    )
    if "reduced" in form:
        assert (config["medusa_vocab_size"], config["vocab_size"]) == (8, 61)
    assert config.get("medusa_markov_rank", 0) == (4 if "markov" in form else 0)
    assert any(re.fullmatch(r"\d\.\d\.weight", name) for name in names) is ("shared" not in form)


def test_a_draft_that_was_trained_with_dropout_guesses_without_it(
    tmp_path: Path, target_model: TargetModel
) -> None:
    trained = DRAFTS["hydra"].from_target_model(target_model, num_heads=2, dropout=0.5)
    save_draft(trained, tmp_path, "base")
    loaded = load_draft(tmp_path, target_model)
    assert loaded.settings["dropout"] == 0.5
    assert not any(module.training for module in loaded.modules())


def test_files_and_config_are_the_reference_s(tmp_path: Path, target_model: TargetModel) -> None:
    save_draft(trained(target_model, 2), tmp_path, "some/model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [HEADS_CONFIG, SAFETENSORS]
    assert json.loads((tmp_path / HEADS_CONFIG).read_text()) == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "some/model",
    }
    shapes = {
        name: list(tensor.shape) for name, tensor in load_file(tmp_path / SAFETENSORS).items()
    }
    d, v = target_model.hidden_size, target_model.vocab_size
    assert shapes == {
        f"{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "0.linear.weight": [d, d],
            "0.linear.bias": [d],
            "1.weight": [v, d],
        }.items()
    }


@pytest.mark.parametrize("with_config", [True, False])
def test_the_public_code_s_pt_file_is_read(
    tmp_path: Path, target_model: TargetModel, with_config: bool
) -> None:
    draft = trained(target_model, 5)
    write_heads(read_heads(save_draft(draft, tmp_path, "m")), tmp_path, pickled=True)
    (tmp_path / SAFETENSORS).unlink()
    if not with_config:
        (tmp_path / HEADS_CONFIG).unlink()
    assert_same(load_draft(tmp_path, target_model), draft)
    assert read_heads(tmp_path).target_model_name == ("m" if with_config else None)


class Hostile:
    """What a pickle can do: run a command of its maker's choice on loading."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("file", [PICKLED, "pytorch_model.bin"])
def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path, file: str) -> None:
    trap = tmp_path / "trap"
    (tmp_path / HEADS_CONFIG).write_text('{"medusa_num_heads": 2}')
    torch.save(
        {"medusa_head.0.0.linear.weight": torch.zeros(2, 2), "medusa_head.x": Hostile(trap)},
        tmp_path / file,
    )
    with pytest.raises(CheckpointError, match="rejected") as caught:
        read_heads(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert f"{os.mkdir.__module__}.mkdir" in str(caught.value)  # what it would have called
    assert "will likely succeed" not in str(caught.value)  # torch's advice to load it all the same
    assert not trap.exists()
    torch.load(tmp_path / file, weights_only=False)
    assert trap.exists()  # the trap does work where code is run


@pytest.mark.parametrize("name", [PICKLED, SAFETENSORS])
@pytest.mark.parametrize("content", [b"", b"not a file of torch", pickle.dumps([1, 2], 2)])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_heads(tmp_path)


@pytest.mark.parametrize("layout", ["reference", "vllm"])
def test_heads_that_lack_a_tensor_are_named_with_their_file(tmp_path: Path, layout: str) -> None:
    tensors = reference_tensors() if layout == "reference" else vllm_tensors()
    name = "1.1.weight" if layout == "reference" else "lm_heads.1.weight"
    del tensors[name]
    path = tmp_path / (SAFETENSORS if layout == "reference" else "model.safetensors")
    write(tmp_path, tensors, vllm_config() if layout == "vllm" else {}, path.name)
    with pytest.raises(CheckpointError, match=f"^{path}: incomplete, {name} missing$"):
        read_heads(tmp_path)


def test_heads_for_another_target_model(tmp_path: Path, target_model: TargetModel) -> None:
    save_draft(
        MedusaDraft(target_model.hidden_size, target_model.vocab_size + 3, 2, 1),
        tmp_path,
        "the/right-one",
    )
    with pytest.raises(CheckpointError, match="the/right-one"):
        load_draft(tmp_path, target_model)
    wider = random_target_model("llama", dtype=torch.float32, vocab_size=80)
    save_draft(
        DRAFTS["hydra"].from_target_model(wider, num_heads=1), tmp_path / "hydra", "the/right-one"
    )
    with pytest.raises(
        CheckpointError, match=r"\(size mismatch for lm_heads.0.weight: .*the/right-one"
    ):
        load_draft(tmp_path / "hydra", target_model)


def test_a_failing_write_keeps_the_old_heads(tmp_path: Path, target_model: TargetModel) -> None:
    old = trained(target_model, seed=1)
    save_draft(old, tmp_path, "m")
    with full_disk(1000), pytest.raises(CheckpointError, match="could not write the heads"):
        save_draft(trained(target_model, seed=2), tmp_path, "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == [HEADS_CONFIG, SAFETENSORS]
    assert_same(load_draft(tmp_path, target_model), old)


def test_read_accepts_files_that_others_wrote(tmp_path: Path, target_model: TargetModel) -> None:
    """The public trainer shares one block among layers, so its file holds equal tensors under
    several names.
    """
    d, v = target_model.hidden_size, target_model.vocab_size
    block, bias = torch.randn(d, d), torch.randn(d)
    tensors = {f"0.{j}.linear.weight": block.clone() for j in range(2)}
    tensors |= {f"0.{j}.linear.bias": bias.clone() for j in range(2)}
    save_file({**tensors, "0.2.weight": torch.randn(v, d)}, str(tmp_path / SAFETENSORS))
    draft = load_draft(tmp_path, target_model)
    assert (draft.num_heads, draft.num_layers) == (1, 2)
    assert torch.equal(draft.blocks[0][1].linear.weight, block)


#: Of a Medusa-2 full model; published configs understate the number of heads.
MODEL_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
}


def full_model(directory: Path, form: str, prefix: str = "medusa_head.") -> Path:
    """A Medusa-2 full model: one file or shards, safetensors or pickled."""
    everything = {
        **TARGET_MODEL,
        **{prefix + name: tensor for name, tensor in reference_tensors(5).items()},
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG))
    if form == "safetensors":
        save_file(everything, str(directory / "model.safetensors"))
    elif form == "bin":
        torch.save(everything, directory / "pytorch_model.bin")
    else:
        stem, suffix = (
            ("model", "safetensors") if form == "safetensors shards" else ("pytorch_model", "bin")
        )
        names = list(everything)
        parts = [names[:1], names[1:7], names[7:]]  # the first holds no head at all
        where = {}
        for number, part in enumerate(parts, start=1):
            file = f"{stem}-{number:05}-of-00003.{suffix}"
            chosen = {name: everything[name] for name in part}
            save_file(chosen, str(directory / file)) if suffix != "bin" else torch.save(
                chosen, directory / file
            )
            where |= dict.fromkeys(part, file)
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
        (directory / f"{stem}-00001-of-00003.{suffix}").write_bytes(b"is not read")
    return directory


MODEL_FORMS = ["safetensors", "bin", "safetensors shards", "bin shards"]


@pytest.mark.parametrize("form", MODEL_FORMS)
@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_a_medusa_2_full_model_gives_its_heads(tmp_path: Path, form: str, prefix: str) -> None:
    model = full_model(tmp_path / "model", form, prefix)
    assert find_heads(model).layout == "model"
    heads = read_heads(model)
    assert same(names_in_files(heads.state, heads.num_layers), reference_tensors(5))
    assert heads.target_model_name == str(model)  # the target model is the one beside them
    assert heads.num_heads == 5  # whatever config.json says


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_damaged_and_not_finite_heads_are_refused(kind: str, tmp_path: Path) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    draft = DRAFTS[kind].from_target_model(target_model, num_heads=2, num_layers=1)
    directory = save_draft(draft, tmp_path / "heads", "m")
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: its checksum is"):
        load_draft(directory, target_model)
    with torch.no_grad():
        weight = next(p for p in draft.parameters() if p.dim() > 1)
        weight[0, :2] = float("nan")
    save_draft(draft, directory, "m")
    with pytest.raises(CheckpointError, match=r"2 of the [\d,]+ values of .+ are NaN or infinite"):
        load_draft(directory, target_model)


def test_what_config_json_says_otherwise_or_beside_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An understated number of heads, and entries that nothing reads."""
    save_file(reference_tensors(heads=3, blocks=1), tmp_path / SAFETENSORS)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2", "zyxw": 1}
    (tmp_path / HEADS_CONFIG).write_text(json.dumps(config))
    warn_once.cache_clear()
    assert read_heads(tmp_path).num_heads == 3
    source = tmp_path / SAFETENSORS
    shown = [record.message for record in caplog.records]
    assert f"{source}: config.json has medusa_num_heads: 2, the tensors are of 3: all are used" in (
        shown
    )
    assert f"{source}: config.json, not read: zyxw" in shown


def test_biases_that_vllm_ignores_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(vllm_tensors(heads=2), tmp_path / "model.safetensors")
    config = vllm_config(heads=2, medusa_fc_bias=False, abcd=True)
    (tmp_path / HEADS_CONFIG).write_text(json.dumps(config))
    warn_once.cache_clear()
    heads = read_heads(tmp_path)
    assert not heads.state["blocks.0.0.linear.bias"].any()
    shown = " ".join(record.message for record in caplog.records)
    assert "the biases of the blocks are not used, as in vLLM" in shown
    assert "config.json, not read: abcd" in shown


def test_weights_of_whole_numbers_are_refused(target_model: TargetModel, tmp_path: Path) -> None:
    """They would be read as if they were not quantized."""
    save_draft(trained(target_model), tmp_path, "base")
    tensors = load_file(tmp_path / SAFETENSORS)
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / SAFETENSORS)
    with pytest.raises(
        CheckpointError, match=f"{name} holds whole numbers .torch.int8., not weigh"
    ):
        load_draft(tmp_path, target_model)


def test_heads_of_two_kinds_in_one_directory_are_named(
    target_model: TargetModel, tmp_path: Path
) -> None:
    save_draft(trained(target_model), tmp_path, "base")
    save_draft(DRAFTS["hydra"].from_target_model(target_model, num_heads=2), tmp_path, "base")
    with pytest.raises(CheckpointError, match=f"two kinds, draft.safetensors and {SAFETENSORS}"):
        load_draft(tmp_path, target_model)


@pytest.mark.parametrize("extra", [True, False])
def test_a_tensor_too_many_or_too_few_is_not_blamed_on_the_target_model(
    extra: bool, target_model: TargetModel, tmp_path: Path
) -> None:
    save_draft(DRAFTS["hydra"].from_target_model(target_model, num_heads=2), tmp_path, "base")
    tensors = load_file(tmp_path / "draft.safetensors")
    if extra:
        tensors["further"] = torch.zeros(2)
    else:
        del tensors["lm_heads.0.weight"]
    save_file(tensors, tmp_path / "draft.safetensors")
    with pytest.raises(CheckpointError, match=r"not those that config\.json describes"):
        load_draft(tmp_path, target_model)
