"""The same questions through several decoders: figures are sums, missing decoders are noted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peers
import pytest

from medusa_train.checkpoint.load_model import load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.evaluation.records import TimedAnswer, TurnRecord
from tests.evaluation.tiny_model import write_backbone, write_bench, write_run

VLLM_INSTALLED = importlib.util.find_spec("vllm") is not None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    return write_run(home / "run", write_backbone(home / "backbone"))


def test_figures_are_sums_over_turns() -> None:
    plain = TimedAnswer((1, 2, 3, 4), 4.0, 1.0, 3)
    other = TimedAnswer((1, 2, 9), 1.0)
    records = [
        TurnRecord(n, "sums", 1, (5,), TimedAnswer((1, 2, 3, 4), 2.0, 1.0, 1, (2,)), plain, plain, others={"x": other})
        for n in range(2)
    ]
    figures = peers.figures(peers.answers_by_decoder(records))
    assert list(figures) == ["tree", "plain", "generate", "x"]
    tree, lookup = figures["tree"], figures["x"]
    assert (tree["answers"], tree["tokens"], tree["equal"]) == (2, 8, 2)
    assert (tree["tokens_per_s"], tree["tokens_per_step"]) == (2.0, 3.0)
    assert figures["plain"]["tokens_per_step"] == figures["generate"]["tokens_per_step"] == 1.0
    assert (lookup["tokens_per_s"], lookup["tokens_per_step"], lookup["equal"]) == (3.0, None, 0)


@pytest.mark.skipif(VLLM_INSTALLED, reason="checks that vLLM is skipped")
def test_the_whole_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = write_bench(tmp_path / "questions.jsonl")
    words = [str(run), "--bench", str(bench), "--max-new-tokens", "12", "--dtype", "float32", "--rounds", "2"]
    assistant = json.loads((run / "heads" / "config.json").read_text())["base_model_name_or_path"]
    assert peers.main([*words, "--assistant", assistant, "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert list(record["decoders"]) == ["tree", "plain", "generate", "assisted", "prompt_lookup"]
    for one in record["decoders"].values():
        assert (one["answers"], one["equal"]) == (8, 8)  # four turns fit, in two rounds
        assert one["tokens_per_s"] > 0
    by_name = record["decoders"]
    assert by_name["plain"]["tokens_per_step"] == 1.0
    assert by_name["tree"]["tokens_per_step"] >= 1.0
    assert by_name["generate"]["tokens_per_step"] == 1.0
    assert by_name["assisted"]["tokens_per_step"] > 1.5  # the backbone as its own assistant
    assert by_name["prompt_lookup"]["tokens_per_step"] >= 1.0
    assert record["run"]["turns"] == 8
    assert record["notes"] == ["vLLM: skipped, not installed"]
    page = (tmp_path / "out" / "peers.md").read_text()
    assert "| this project, the run's tree |" in page
    assert "- vLLM: skipped, not installed" in page
    assert "python benchmarks/peers.py" in page
    assert "vLLM: skipped" in capsys.readouterr().out


def test_a_missing_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main([str(tmp_path / "none")]) == 1
    assert "no such directory" in capsys.readouterr().err


class FakeEngine:
    """Answers with three tokens, and counts one draft per answer if it has heads."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 (what the test looks at)

    def __init__(self, **how: Any) -> None:
        self.made.append(how)
        self._drafts = 0
        if how["speculative_config"]:
            assert (Path(how["speculative_config"]["model"]) / "model.safetensors").is_file()

    def generate(self, prompts: list[dict[str, list[int]]], how: Any, use_tqdm: bool) -> list[Any]:
        assert (how.temperature, len(prompts), use_tqdm) == (0.0, 1, False)
        self._drafts += 1
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=prompts[0]["prompt_token_ids"][:3])])]

    def get_metrics(self) -> list[Any]:
        count = self._drafts if self.made[-1]["speculative_config"] else 0
        return [SimpleNamespace(name="vllm:spec_decode_num_drafts", value=count), SimpleNamespace(name="other")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of vLLM's name."""
    module = ModuleType("vllm")
    module.__dict__.update(LLM=FakeEngine, SamplingParams=SimpleNamespace, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: module if name == "vllm" else None)
    monkeypatch.setattr(FakeEngine, "made", [])


@pytest.mark.usefixtures("installed")
def test_vllm_is_given_the_exported_heads(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.export.write.check_vllm_directory", lambda directory, weights: "checked")
    paths = resolve_model(str(run), None, None)
    subject = load_with_draft(paths, "float32")
    stats = peers.vllm_answerers(subject, paths, "float32", tmp_path, 0.25, pytest.fail)
    assert list(stats) == [peers.VLLM, peers.VLLM_MEDUSA]
    plain, heads = FakeEngine.made
    assert plain["speculative_config"] is None
    assert (heads["model"], heads["dtype"], heads["max_model_len"]) == (paths.base_model, "float32", 256)
    assert heads["speculative_config"]["method"] == "medusa"
    assert heads["speculative_config"]["num_speculative_tokens"] == 3
    answer = stats[peers.VLLM_MEDUSA].answer([5, 6, 7, 8], 3)
    assert (answer.tokens, answer.steps) == ((5, 6, 7), 1)


@pytest.mark.usefixtures("installed")
def test_an_engine_that_does_not_start_is_skipped(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, **how: Any) -> None:
        raise RuntimeError("no GPU\nand more")

    monkeypatch.setattr(FakeEngine, "__init__", fail)
    paths = resolve_model(str(run), None, None)
    notes: list[str] = []
    assert peers.vllm_answerers(load_with_draft(paths, "float32"), paths, "float32", tmp_path, 0.2, notes.append) == {}
    assert notes == ["vLLM: skipped (RuntimeError: no GPU)"]
