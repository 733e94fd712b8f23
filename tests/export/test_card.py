"""The model card: header for the hub, settings, data, figures, licence; nothing of this machine's directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.export.card import model_card
from medusa_train.export.write import export_run


def card(run: Path, to: str = "vllm", licence: str | None = None) -> tuple[dict[str, object], str]:
    text = model_card(resolve_model(str(run), None, None), read_heads(run / "heads"), to, licence)  # type: ignore[arg-type]
    _, header, body = text.split("---", 2)
    return yaml.safe_load(header), body


def test_the_card_lists_settings_data_and_measurements(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(learning_rate=5e-4, recipe="medusa1", load_in_4bit=False)
    header, body = card(run)
    assert header == {"license": "other", "tags": ["medusa", "speculative-decoding"]}
    for words in (
        "# Medusa heads for `small-llama`",
        "5 draft heads with 1 residual block each",
        "vllm serve",
        '"num_speculative_tokens": N}',
        "Choose N, from 1 to 5, by measuring",
        "that chain gives 1.81 tokens per step on mtbench",
        "| `learning_rate` | 0.0005 |",
        "| `recipe` | medusa1 |",
        "`chats.jsonl` (a local file)",
        "| mtbench | a GPU | bfloat16 | 16 | 2.35 | 1.10 | 2.13 | - | 80/80 | 61/80 |",
        "## Licence",
    ):
        assert words in body, words
    assert "load_in_4bit" not in body  # off
    assert str(tmp_path) not in body
    assert "/home/me" not in body


def test_hub_names_are_in_the_card_header(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(base_model="some/model", datasets=[{"path": "some/chats"}, {"path": "own.jsonl"}])
    header, body = card(run, licence="apache-2.0")
    assert header["base_model"] == "some/model"
    assert header["datasets"] == ["some/chats"]
    assert header["license"] == "apache-2.0"
    assert "## Licence\n\napache-2.0" in body


@pytest.mark.parametrize(("text", "expected"), [("---\nlicense: mit\n---\nx", "mit"), ("no header", "other")])
def test_the_licence_is_read_from_a_local_base_model(
    make_run: Callable[..., Path], tmp_path: Path, text: str, expected: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(text)
    header, _ = card(make_run(base_model=str(base)))
    assert header["license"] == expected


def test_heads_without_a_run_get_a_card(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    (run / "heads").rename(tmp_path / "alone")
    done = export_run(resolve_model(str(tmp_path / "alone"), None, None), "tgi")
    text = (done.target / "README.md").read_text()
    assert "Nothing has been measured" in text
    assert "## Training" not in text
    merged = model_card(
        resolve_model(str(tmp_path / "alone"), None, None), read_heads(tmp_path / "alone"), "merged", None
    )
    assert "# Backbone trained with Medusa heads" in merged
