"""Runs with a reduced vocabulary, which is the text's, or a Markov bias: trained, resumed, exported, decoded with."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_backbone
from medusa_train.models.precision import choose_precision
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.estimate import Estimate
from medusa_train.training.load_data import load_data
from medusa_train.training.run import train
from medusa_train.training.validation import validate
from medusa_train.trees.tree import Tree
from tests.training.conftest import metrics

SIZE = 24


@pytest.mark.parametrize(
    "keys", [{}, {"medusa_share_lm_head": True, "medusa_soft_targets": 0.5}], ids=["own", "shared"]
)
def test_a_run_from_its_text_to_decoding(make_config, console, tmp_path, backbone_dir, keys) -> None:
    cfg = make_config(medusa_vocab_size=SIZE, calibration_tokens=60, **keys)
    assert train(cfg, console, console) == 0
    data = load_data(cfg, console)
    counts = torch.zeros(300, dtype=torch.long)
    for example in data.train:
        for token in example.tokens[example.supervised].tolist():
            counts[token] += 1
    out = tmp_path / "run"
    kept = load_file(out / "heads" / "medusa_lm_head.safetensors")["token_map"]
    assert len(kept) == SIZE
    assert 1 in kept.tolist()  # </s> ends every answer
    others = sorted(set(range(300)) - set(kept.tolist()))
    assert int(counts[kept].min()) >= int(counts[others].max()) > 0
    share = int(counts[kept].sum()) / int(counts.sum())
    assert f"draft vocabulary: 24 of 300 tokens, covering {share:.2%} of training targets" in console.file.getvalue()
    logged = [line for line in metrics(out) if line["kind"] == "train"]
    assert all(0 < line["outside_vocabulary"] < 1 for line in logged)
    assert logged[-1]["loss"] < logged[0]["loss"]

    backbone = load_backbone(str(backbone_dir))
    draft = load_draft(out / "heads", backbone)
    prompt = data.prompts.prompts()[0]
    plain = Decoder(backbone).generate(prompt, 30).tokens
    assert Decoder(backbone, draft, Tree.load(out / "tree.json")).generate(prompt, 30).tokens == plain

    facts = export_run(resolve_model(str(out), None, None), "vllm").facts
    assert any("the other rows are filled in" in fact for fact in facts)
    config = json.loads((out / "export" / "vllm" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["medusa_vocab_size"]) == (300, SIZE)
    for to in ("reference", "reference-v2", "tgi", "trtllm"):
        with pytest.raises(CheckpointError, match=r"24 tokens .* --to vllm"):
            export_run(resolve_model(str(out), None, None), to)


REDUCED = {"medusa_vocab_size": SIZE, "medusa_share_lm_head": True}
MARKOV = {"medusa_markov_rank": 4}


def heads(run) -> dict[str, torch.Tensor]:
    return load_file(run / "heads" / "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    "keys",
    [{}, {"medusa_share_lm_head": True, "medusa_vocab_size": 24}],
    ids=["plain", "shared lm_head, reduced"],
)
def test_a_run_with_a_markov_bias(make_config, console, tmp_path, backbone_dir, keys) -> None:
    cfg = make_config(**MARKOV, **keys, calibration_tokens=60)
    assert train(cfg, console, console) == 0
    out = tmp_path / "run"
    assert "with a Markov bias of rank 4" in console.file.getvalue()
    learnt = heads(out)
    rows = learnt["markov.output.weight"]
    assert rows.shape == (24 if keys else 300, 4)
    assert float(rows.abs().max()) > 1e-3  # 0 before training
    logged = [line["loss"] for line in metrics(out) if line["kind"] == "train"]
    assert logged[-1] < logged[0]
    backbone = load_backbone(str(backbone_dir))
    draft = load_draft(out / "heads", backbone)
    assert isinstance(draft, MedusaDraft)
    assert draft.settings == cfg.draft_config.settings
    memory = Estimate(cfg, backbone.config).memory(rows=2, width=64, dtype=torch.float32, device="cpu")
    assert memory.trained == sum(parameter.numel() for parameter in draft.parameters())
    prompt = load_data(cfg, console).prompts.prompts()[0]
    plain = Decoder(backbone).generate(prompt, 30).tokens
    for tree in (Tree.load(out / "tree.json"), Tree.cartesian([3, 2, 2])):
        assert Decoder(backbone, draft, tree).generate(prompt, 30).tokens == plain
    for to in ("reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers"):
        with pytest.raises(CheckpointError, match=rf"medusa_markov_rank: 4\), which the layout of {to} cannot store"):
            export_run(resolve_model(str(out), None, None), to)
    assert not (out / "export").exists()


@pytest.mark.parametrize("options", [REDUCED, MARKOV], ids=["vocabulary", "markov"])
def test_resumed_is_uninterrupted_to_the_bit(make_config, console, tmp_path, options) -> None:
    keys = {**options, "save_steps": 3, "lr_scheduler": "constant"}
    train(make_config(**keys, output_dir=str(tmp_path / "whole")), console, console)
    train(make_config(**keys, output_dir=str(tmp_path / "part"), max_steps=3), console, console)
    train(make_config(**keys, output_dir=str(tmp_path / "part"), resume_from_checkpoint="auto"), console, console)
    first, second = heads(tmp_path / "whole"), heads(tmp_path / "part")
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "default", "kept"),
    [
        ({"medusa_vocab_size": SIZE}, None, ["token_map"]),
        (MARKOV, 0, ["markov.embedding.weight", "markov.output.weight"]),
    ],
    ids=["vocabulary", "markov"],
)
def test_stage_two_goes_on_with_the_heads_of_stage_one(make_config, console, tmp_path, options, default, kept) -> None:
    train(make_config(**options, output_dir=str(tmp_path / "one")), console, console)
    start = {
        "lora_model_dir": str(tmp_path / "one"),
        "recipe": "medusa2",
        "adapter": "lora",
        "lora_target_linear": True,
        "output_dir": str(tmp_path / "two"),
    }
    ((key, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{key}: {value}, the configuration sets {key}: {default}"):
        train(make_config(**start), console, console)
    train(make_config(**start, **options, max_steps=1, learning_rate=1e-6), console, console)
    first, second = heads(tmp_path / "one"), heads(tmp_path / "two")
    for name in kept:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_vocabulary_that_is_not_reduced_is_refused_at_once(make_config, console, kind, size) -> None:
    key = {"medusa_vocab_size": size} if kind == "medusa" else {"draft": kind, kind: {"vocab_size": size}}
    with pytest.raises(ConfigError, match=rf"^{kind}[._]vocab_size: [\d,]+ must be less than the 300 tokens"):
        load_data(make_config(**key), console)


@pytest.mark.parametrize("kind", ["hydra", "amphista"])
def test_other_drafts_are_trained_resumed_and_decoded_with(kind, make_config, console, tmp_path, backbone_dir) -> None:
    section = {"num_heads": 2, "vocab_size": SIZE}
    keys = {"draft": kind, kind: section, "save_steps": 3, "lr_scheduler": "constant"}
    whole, part = ({**keys, "output_dir": str(tmp_path / name)} for name in ("whole", "part"))
    train(make_config(**whole, calibration_tokens=60), console, console)
    assert f"2 {kind.capitalize()}" in console.file.getvalue()
    assert "draft vocabulary: 24 of 300 tokens" in console.file.getvalue()
    assert all(0 < line["outside_vocabulary"] < 1 for line in metrics(tmp_path / "whole") if line["kind"] == "train")
    backbone = load_backbone(str(backbone_dir))
    draft = load_draft(tmp_path / "whole" / "heads", backbone)
    assert (draft.draft_vocab_size, draft.lm_head(2).weight.shape) == (SIZE, (SIZE, 32))
    plain = Decoder(backbone).generate([0, 2, 10, 3], 30, ()).tokens
    tree = Tree.load(tmp_path / "whole" / "tree.json")
    assert Decoder(backbone, draft, tree).generate([0, 2, 10, 3], 30, ()).tokens == plain

    train(make_config(**part, max_steps=3), console, console)
    train(make_config(**part, resume_from_checkpoint="auto"), console, console)
    first, second = (load_file(tmp_path / name / "heads" / "draft.safetensors") for name in ("whole", "part"))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    all_tokens = {**keys, kind: {"num_heads": 2}, "lora_model_dir": str(tmp_path / "whole")}
    with pytest.raises(ConfigError, match=rf"{kind}\.vocab_size: 24, the configuration sets {kind}\.vocab_size: None"):
        train(make_config(**all_tokens), console, console)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_missing_token_is_a_miss_on_held_out_text(make_config, backbone_dir, kind) -> None:
    cfg = make_config()
    data = load_data(cfg, Console(file=io.StringIO()))
    backbone = load_backbone(str(backbone_dir))
    recipe = BackboneRecipe(backbone, choose_precision(False, torch.device("cpu")))
    kept = torch.arange(1, 280, 7)
    draft = DRAFTS[kind].from_backbone(backbone, num_heads=2, vocab_size=len(kept), token_map=kept).eval()
    batch = data.validation.batch([[i] for i in range(len(data.validation))])
    found = validate(recipe, draft, [batch], Objective(draft, 0.8))
    assert found is not None
    feats = backbone.run(batch.tokens, positions=batch.positions, segments=batch.segments)
    for k, states in enumerate(draft.head_states(feats, batch), start=1):
        target = shift_labels(batch.labels, k, batch.segments)
        valid = target != IGNORE_INDEX
        tokens, logits = target[valid], draft.lm_head(k).logits(states[valid])
        known = torch.isin(tokens, kept)
        assert (found.targets[k - 1], found.in_vocab[k - 1]) == (len(tokens), int(known.sum()))
        assert found.top[k - 1][0] == pytest.approx(float((kept[logits.argmax(-1)] == tokens).double().mean()))
        places = torch.searchsorted(kept, tokens[known])
        loss = torch.nn.functional.cross_entropy(logits[known], places).detach()
        assert found.head_loss[k - 1] == pytest.approx(float(loss), rel=1e-5)
    assert 0 < found.in_vocab[0] < found.targets[0]
    assert found.record()["targets_in_vocabulary"] == found.in_vocab
