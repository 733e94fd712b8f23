"""Runs with a reduced vocabulary, which is the text's, or a Markov bias: chosen, exported, resumed,
evaluated.
"""

import io
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.export.write import export_run
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_backbone
from medusa_train.models.precision import choose_precision
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.load_data import load_data
from medusa_train.training.validation import validate
from tests.training.conftest import LORA, train

SIZE = 24


def test_heads_keep_the_most_frequent_tokens_and_only_vllm_stores_them(
    make_config, console, tmp_path
) -> None:
    cfg = make_config(medusa_vocab_size=SIZE)
    assert train(cfg, console) == 0
    data = load_data(cfg, console)
    counts = torch.zeros(300, dtype=torch.long)
    for example in data.train:
        for token in example.tokens[example.supervised].tolist():
            counts[token] += 1
    out = tmp_path / "run"
    kept = heads(out)["token_map"]
    assert len(kept) == SIZE
    assert 1 in kept.tolist()  # </s> ends every answer
    assert (
        int(counts[kept].min())
        >= int(counts[sorted(set(range(300)) - set(kept.tolist()))].max())
        > 0
    )
    share = int(counts[kept].sum()) / int(counts.sum())
    assert (
        f"draft vocabulary: 24 of 300 tokens, covering {share:.2%} of training targets"
        in console.file.getvalue()
    )

    facts = export_run(resolve_model(str(out), None, None), "vllm").facts
    assert any("the other rows are filled in" in fact for fact in facts)
    config = json.loads((out / "export" / "vllm" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["medusa_vocab_size"]) == (300, SIZE)
    for to in ("reference", "reference-v2", "tgi", "trtllm"):
        with pytest.raises(CheckpointError, match=r"24 tokens .* --to vllm"):
            export_run(resolve_model(str(out), None, None), to)


def test_no_other_layout_stores_a_markov_bias(make_config, console, tmp_path) -> None:
    assert train(make_config(medusa_markov_rank=4), console) == 0
    out = tmp_path / "run"
    assert "with a Markov bias of rank 4" in console.file.getvalue()
    assert float(heads(out)["markov.output.weight"].abs().max()) > 1e-3  # 0 before training
    for to in ("reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers"):
        with pytest.raises(
            CheckpointError,
            match=rf"medusa_markov_rank: 4\), which the layout of {to} cannot store",
        ):
            export_run(resolve_model(str(out), None, None), to)
    assert not (out / "export").exists()


def heads(run) -> dict[str, torch.Tensor]:
    return load_file(run / "heads" / "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    ("options", "default", "kept"),
    [
        ({"medusa_vocab_size": SIZE}, None, ["token_map"]),
        ({"medusa_markov_rank": 4}, 0, ["markov.embedding.weight", "markov.output.weight"]),
    ],
    ids=["vocabulary", "markov"],
)
def test_stage_two_goes_on_with_the_heads_of_stage_one(
    make_config, console, tmp_path, options, default, kept
) -> None:
    train(make_config(**options, output_dir=str(tmp_path / "one")), console)
    start = {**LORA, "lora_model_dir": str(tmp_path / "one"), "output_dir": str(tmp_path / "two")}
    ((key, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{key}: {value}, the configuration {key}: {default}"):
        train(make_config(**start), console)
    train(make_config(**{**start, **options, "max_steps": 1, "learning_rate": 1e-6}), console)
    first, second = heads(tmp_path / "one"), heads(tmp_path / "two")
    for name in kept:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_vocabulary_that_is_not_reduced_is_refused_at_once(
    make_config, console, kind, size
) -> None:
    key = (
        {"medusa_vocab_size": size}
        if kind == "medusa"
        else {"draft": kind, kind: {"vocab_size": size}}
    )
    with pytest.raises(
        ConfigError, match=rf"^{kind}[._]vocab_size: [\d,]+ must be less than the 300 tokens"
    ):
        load_data(make_config(**key), console)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_missing_token_is_a_miss_on_held_out_text(make_config, backbone_dir, kind) -> None:
    data = load_data(make_config(), Console(file=io.StringIO()))
    backbone = load_backbone(str(backbone_dir))
    recipe = BackboneRecipe(backbone, choose_precision(False, torch.device("cpu")))
    kept = torch.arange(1, 280, 7)
    draft = (
        DRAFTS[kind]
        .from_backbone(backbone, num_heads=2, vocab_size=len(kept), token_map=kept)
        .eval()
    )
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
        assert found.top[k - 1][0] == pytest.approx(
            float((kept[logits.argmax(-1)] == tokens).double().mean())
        )
        loss = torch.nn.functional.cross_entropy(
            logits[known], torch.searchsorted(kept, tokens[known])
        ).detach()
        assert found.head_loss[k - 1] == pytest.approx(float(loss), rel=1e-5)
    assert 0 < found.in_vocab[0] < found.targets[0]
    assert found.record()["targets_in_vocabulary"] == found.in_vocab
