import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from rich.console import Console
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.data.examples import EncodedDataset
from medusa_train.evaluation import target_model_quality
from medusa_train.evaluation.target_model_quality import (
    QUALITY_TOKENS,
    compare_target_models,
    load_versions,
    measure_target_model_quality,
)
from medusa_train.models.loading import load_target_model
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from tests.evaluation.tiny_model import write_run


def adapted(target_model_dir: Path, directory: Path) -> None:
    """Save an adapter on every linear layer that changes the target model."""
    adapter = Adapter.attach(
        load_target_model(str(target_model_dir)), LoraSpec(r=4, alpha=8, dropout=0.5)
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0, 0.05)
    adapter.save(directory)


@pytest.fixture
def joint_run(tmp_path: Path, target_model_dir: Path) -> Path:
    """A run with an adapter that changes its target model, and the data that it learnt."""
    run = write_run(tmp_path / "run", target_model_dir)
    adapted(target_model_dir, run / "adapter")
    chat = {
        "messages": [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Well met, friend."},
        ]
    }
    data = tmp_path / "chats.jsonl"
    lines = [
        json.dumps({"messages": [*chat["messages"], {"role": "user", "content": str(n)}]})
        for n in range(6)
    ]
    data.write_text("\n".join(lines), encoding="utf-8")
    config = {
        "base_model": str(target_model_dir),
        "datasets": [{"path": str(data), "type": "messages"}],
        "adapter": "lora",
    }
    (run / "config.yaml").write_text(
        yaml.safe_dump({**config, "val_set_size": 0.5}), encoding="utf-8"
    )
    return run


def test_a_joint_runs_target_model_is_compared_with_the_original(joint_run: Path) -> None:
    found = measure_target_model_quality(resolve_model(str(joint_run), None, None), Mock())
    assert found is not None
    assert found["kl"] > 1e-4
    assert found["perplexity_after"] != found["perplexity_before"]
    assert found["tokens"] > 0


def test_a_run_with_a_frozen_target_model_is_not_measured(run_dir: Path) -> None:
    assert measure_target_model_quality(resolve_model(str(run_dir), None, None), Mock()) is None


def test_a_run_without_its_data_is_not_measured(joint_run: Path) -> None:
    config = yaml.safe_load((joint_run / "config.yaml").read_text(encoding="utf-8"))
    config["datasets"][0]["path"] = "absent.jsonl"
    (joint_run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert measure_target_model_quality(resolve_model(str(joint_run), None, None), Mock()) is None


def batches() -> list[Batch]:
    """Two batches: one of packed rows, one padded, about half of the tokens supervised."""
    torch.manual_seed(7)
    made = []
    for rows, length, ends in ((2, 14, (6, 14)), (3, 9, (9, 5))):
        tokens = torch.randint(3, 300, (rows, length))
        labels = torch.where(torch.rand(rows, length) < 0.5, tokens, IGNORE_INDEX)
        segments = torch.zeros_like(tokens)
        positions = torch.arange(length).repeat(rows, 1)
        segments[0, ends[0] :] = 1
        positions[0, ends[0] :] -= ends[0]
        segments[1, ends[1] :] = -1
        labels[1, ends[1] :] = IGNORE_INDEX
        made.append(Batch(tokens, labels, positions, segments, ["a"] * rows))
    return made


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same, document by document: tokens [1, T], labels [T]."""
    found = []
    for batch in batches():
        for row in range(len(batch.tokens)):
            for segment in range(int(batch.segments[row].max()) + 1):
                inside = batch.segments[row] == segment
                found.append((batch.tokens[row][inside][None], batch.labels[row][inside]))
    return found


def plain(before: TargetModel, after: TargetModel) -> tuple[int, float, float, float]:
    """Tokens, cross-entropy before and after, KL: from all logits of one document after the other."""
    count, old_loss, new_loss, kl = 0, 0.0, 0.0, 0.0
    for tokens, labels in documents():
        old, new = (
            m.model(tokens).logits[0, :-1].detach()[labels[1:] != IGNORE_INDEX]
            for m in (before, after)
        )
        wanted = labels[1:][labels[1:] != IGNORE_INDEX]
        count += len(wanted)
        old_loss += float(cross_entropy(old, wanted, reduction="sum"))
        new_loss += float(cross_entropy(new, wanted, reduction="sum"))
        kl += float(
            kl_div(log_softmax(new, -1), log_softmax(old, -1), reduction="sum", log_target=True)
        )
    return count, old_loss / count, new_loss / count, kl / count


def write_config(run: Path, target_model_dir: Path) -> None:
    (run / "config.yaml").write_text(
        yaml.safe_dump({"base_model": str(target_model_dir)}), encoding="utf-8"
    )


def test_a_run_with_an_adapter_against_plain_formulas(
    run_dir: Path, target_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "heads").symlink_to(run_dir / "heads")
    write_config(tmp_path, target_model_dir)
    adapted(target_model_dir, tmp_path / "adapter")
    found = compare_target_models(
        *load_versions(resolve_model(str(tmp_path), None, None), str(target_model_dir)),
        batches(),
        print,
    )
    merged = load_target_model(str(target_model_dir))
    Adapter.load(merged, tmp_path / "adapter").merge()
    tokens, before, after, kl = plain(load_target_model(str(target_model_dir)), merged)
    assert kl > 0.01
    assert found.tokens == tokens
    assert (found.loss_before, found.loss_after, found.kl) == pytest.approx(
        (before, after, kl), rel=1e-4
    )


def test_a_trained_model_is_compared_with_the_original(
    run_dir: Path, target_model_dir: Path, tmp_path: Path
) -> None:
    changed = load_target_model(str(target_model_dir))
    torch.manual_seed(4)
    with torch.no_grad():
        changed.model.lm_head.weight.add_(0.02 * torch.randn_like(changed.model.lm_head.weight))
    changed.model.save_pretrained(tmp_path / "model")
    changed.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "heads").symlink_to(run_dir / "heads")
    write_config(tmp_path, target_model_dir)
    found = compare_target_models(
        *load_versions(resolve_model(str(tmp_path), None, None), str(target_model_dir)),
        batches(),
        print,
    )
    _, before, after, kl = plain(load_target_model(str(target_model_dir)), changed)
    assert kl > 0.001
    assert (found.loss_before, found.loss_after, found.kl) == pytest.approx(
        (before, after, kl), rel=1e-4
    )


def test_a_frozen_target_model_is_bitwise_unchanged(run_dir: Path, target_model_dir: Path) -> None:
    found = compare_target_models(
        *load_versions(resolve_model(str(run_dir), None, None), str(target_model_dir)),
        batches(),
        print,
    )
    assert found.loss_before > 0
    assert (found.loss_after, found.kl) == (found.loss_before, 0.0)


def test_conversations_are_measured_in_batches_and_counted(
    joint_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = RunProgress(Console(quiet=True))
    paths = resolve_model(str(joint_run), None, None)
    with progress.phase("perplexity", QUALITY_TOKENS, "tokens") as phase:
        together = measure_target_model_quality(paths, phase)
    assert together is not None
    assert phase.line().startswith(f"perplexity: {together['tokens']}/{together['tokens']} tokens")

    batches: list[int] = []
    batch = EncodedDataset.batch
    monkeypatch.setattr(
        EncodedDataset, "batch", lambda self, rows: batches.append(len(rows)) or batch(self, rows)
    )
    assert measure_target_model_quality(paths, Mock()) == together
    monkeypatch.setattr(target_model_quality, "_POSITIONS", 1)
    apart = measure_target_model_quality(paths, Mock())
    count = batches[0]
    assert count > 1
    assert batches[1:] == [1] * count
    assert apart is not None
    assert apart["tokens"] == together["tokens"]
    for name in ("perplexity_before", "perplexity_after", "kl"):
        assert apart[name] == pytest.approx(together[name], rel=1e-4)
