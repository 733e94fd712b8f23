"""DFlash drafts in the layout of servers: names, shapes and entries, and reading them back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train import load
from medusa_train.checkpoint.heads import load_draft, save_draft
from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.errors import CheckpointError
from medusa_train.export.publish import Export
from medusa_train.export.write import export_run
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5]])
VOCABULARY = torch.arange(40)
#: The public layout, with d = 64 and two states, for each layer.
NAMES = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{one}_proj" for one in "qkvo"),
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
}


@pytest.fixture
def target_model(target_model_dir: Path) -> TargetModel:
    return load_target_model(str(target_model_dir), dtype="float32", device="cpu")


def exported_draft(
    target_model: TargetModel,
    target_model_dir: Path,
    tmp_path: Path,
    to: Any = "vllm",
    **settings: object,
) -> tuple[DFlashDraft, Export]:
    keys = {"max_draft_tokens": 4, "num_layers": 2, "layers": [1, 2], **settings}
    torch.manual_seed(0)
    draft = DFlashDraft(target_model, **keys).eval()
    heads = save_draft(draft, tmp_path / "heads", str(target_model_dir))
    return draft, export_run(resolve_model(str(heads), None, None), to, tmp_path / "out")


def config_of(exported: Export) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((exported.target / "config.json").read_text())
    return config


def guesses(draft: DFlashDraft, target_model: TargetModel) -> torch.Tensor:
    hidden_states = target_model.run(TOKENS, aux_layers=draft.aux_layers)
    states = draft.teacher_forced_states(hidden_states, Rows.from_tokens(TOKENS))
    return torch.stack([draft.lm_head(1).logits(state) for state in states])


@pytest.mark.parametrize("window", [0, 2048])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_an_export_read_back_guesses_the_same(
    to: str, window: int, target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    draft, exported = exported_draft(target_model, target_model_dir, tmp_path, to, window=window)
    loaded = load_draft(exported.target, target_model)
    assert isinstance(loaded, DFlashDraft)
    assert loaded.window == window
    assert torch.equal(guesses(draft, target_model), guesses(loaded, target_model))


def test_names_shapes_and_entries_are_those_of_the_public_layout(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    _, exported = exported_draft(target_model, target_model_dir, tmp_path, mask_token_id=7)
    tensors = load_file(exported.target / "model.safetensors")
    assert set(tensors) == NAMES
    size = target_model.hidden_size
    assert list(tensors["fc.weight"].shape) == [size, 2 * size]
    config = config_of(exported)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == 5
    assert config["num_target_layers"] == target_model.num_layers
    assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["sliding_window"] == 2048
    served = next(fact for fact in exported.facts if fact.startswith("serve it"))
    assert '"method": "dflash"' in served
    assert '"num_speculative_tokens": 4' in served


def test_sglang_is_told_to_draft_the_whole_block(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    """It counts the tokens to verify, the last one of the text included."""
    _, exported = exported_draft(target_model, target_model_dir, tmp_path, "sglang")
    block = config_of(exported)["block_size"]
    served = next(fact for fact in exported.facts if fact.startswith("serve it"))
    assert served.endswith(f"--speculative-num-draft-tokens {block}")
    assert "--speculative-algorithm DFLASH " in served
    card = (exported.target / "README.md").read_text(encoding="utf-8")
    assert f"--speculative-num-draft-tokens {block}\n" in card


def test_a_markov_bias_is_served_by_the_method_of_its_layout(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    _, exported = exported_draft(target_model, target_model_dir, tmp_path, markov_rank=4)
    served = next(fact for fact in exported.facts if fact.startswith("serve it"))
    assert '"method": "dspark"' in served
    assert any("DSpark's layout" in fact for fact in exported.facts)


def test_the_card_describes_the_draft(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    _, exported = exported_draft(target_model, target_model_dir, tmp_path)
    card = (exported.target / "README.md").read_text()
    assert "2 decoder layers that guess 4 tokens in one pass (DFlash" in card
    assert "EAGLE-3" not in card


def test_its_dynamic_trees_decode_to_the_same_text(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    heads = save_draft(
        DFlashDraft(target_model, 4, num_layers=1), tmp_path / "heads", str(target_model_dir)
    )
    plain = load(base_model=str(target_model_dir), dtype="float32")
    dynamic = load(str(heads), tree="dynamic:6x3", dtype="float32")
    chosen = load_for_decoding(resolve_model(str(heads), None, "dynamic:6x3"), "float32").proposer
    assert isinstance(chosen, DFlashDraft)
    assert chosen.dynamic == (6, 3)
    text = "Name three fruits."
    assert dynamic.generate(text, max_new_tokens=12) == plain.generate(text, max_new_tokens=12)


def test_a_bidirectional_draft_has_full_attention(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    _, exported = exported_draft(target_model, target_model_dir, tmp_path, window=0)
    config = config_of(exported)
    assert config["layer_types"] == ["full_attention"] * 2
    assert "sliding_window" not in config or config["sliding_window"] is None


def test_a_markov_bias_is_written_for_vllm_alone_and_marked(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    draft, exported = exported_draft(target_model, target_model_dir, tmp_path, markov_rank=4)
    tensors = load_file(exported.target / "model.safetensors")
    assert draft.markov is not None
    assert torch.equal(tensors["markov_head.markov_w1.weight"], draft.markov.embedding.weight)
    assert torch.equal(tensors["markov_head.markov_w2.weight"], draft.markov.output.weight)
    assert config_of(exported)["architectures"] == ["Qwen3DSparkModel"]
    assert any("never served" in fact for fact in exported.facts)
    loaded = load_draft(exported.target, target_model)
    assert isinstance(loaded, DFlashDraft)
    assert torch.equal(guesses(draft, target_model), guesses(loaded, target_model))
    with pytest.raises(CheckpointError, match="SGLang does not compute a Markov bias"):
        exported_draft(target_model, target_model_dir, tmp_path / "other", "sglang", markov_rank=4)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_a_reduced_vocabulary_is_an_error(
    to: str, target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"dflash\.vocab_size"):
        exported_draft(
            target_model, target_model_dir, tmp_path, to, vocab_size=40, token_map=VOCABULARY
        )


def test_a_published_draft_may_have_layers_of_another_size(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    """Its block_size within dflash_config, its own copy of lm_head, and no entry for the window."""
    layer = {"intermediate_size": 48}
    draft, exported = exported_draft(
        target_model, target_model_dir, tmp_path, window=0, layer=layer
    )
    path = exported.target / "config.json"
    config = config_of(exported)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    for name in ("layer_types", "sliding_window", "use_sliding_window"):
        config.pop(name, None)
    path.write_text(json.dumps(config))
    weights = exported.target / "model.safetensors"
    save_file({**load_file(weights), "lm_head.weight": torch.zeros(3, 3)}, weights)
    loaded = load_draft(exported.target, target_model)
    assert isinstance(loaded, DFlashDraft)
    assert loaded.max_draft_tokens == 4
    assert torch.equal(guesses(draft, target_model), guesses(loaded, target_model))


def test_drafts_of_dspark_itself_are_not_read(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    """There the first token of a block predicts, too."""
    _, exported = exported_draft(target_model, target_model_dir, tmp_path, markov_rank=4)
    config = config_of(exported)
    del config["sample_from_anchor"]
    (exported.target / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"of the kind Qwen3DSparkModel, which is not read"):
        resolve_model(str(exported.target), str(target_model_dir), None)


def test_rotary_angles_are_those_of_the_file(
    target_model: TargetModel, target_model_dir: Path, tmp_path: Path
) -> None:
    """Older files have rope_theta at the top."""
    _, exported = exported_draft(target_model, target_model_dir, tmp_path)
    config = {**config_of(exported), "rope_theta": 5e5}
    config.pop("rope_parameters", None)
    (exported.target / "config.json").write_text(json.dumps(config))
    loaded = load_draft(exported.target, target_model)
    assert isinstance(loaded, DFlashDraft)
    dim = 2 * len(loaded.rotary_emb.inv_freq)
    expected = 5e5 ** -(torch.arange(0, dim, 2) / dim)
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("layer_types", 5, "several kinds of attention"),
        ("sliding_window", None, "sliding_window of None can't be read"),
        ("block_size", "8", "block_size '8'"),
        ("is_causal", False, "causal False and a window of 2048"),
        ("layer_types", ["sliding_attention", "full_attention"], "several kinds of attention"),
        ("attention_bias", True, "biases"),
        ("dflash_config", "none", "dflash_config 'none' in config.json is not a mapping"),
        ("dflash_config", {"target_layer_ids": [0]}, "mask_token_id None"),
        (
            "dflash_config",
            {"mask_token_id": 1, "target_layer_ids": "all"},
            "target_layer_ids 'all'",
        ),
        ("num_hidden_layers", 3, "not those that config.json describes"),
    ],
)
def test_files_of_another_kind_are_an_error(
    entry: str,
    value: object,
    message: str,
    target_model: TargetModel,
    target_model_dir: Path,
    tmp_path: Path,
) -> None:
    _, exported = exported_draft(target_model, target_model_dir, tmp_path)
    path = exported.target / "config.json"
    path.write_text(json.dumps({**config_of(exported), entry: value}))
    with pytest.raises(CheckpointError, match=message):
        load_draft(exported.target, target_model)
