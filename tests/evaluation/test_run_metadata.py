"""With which settings an interrupted evaluation is resumed."""

from pathlib import Path
from typing import Any

import pytest

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.evaluation.questions import load_benchmark
from medusa_train.evaluation.run_metadata import benchmark_settings, measurement_settings
from tests.evaluation.tiny_model import write_bench

SAMPLES = ["acceptance=sampling", "temperature=0.7"]
TYPICAL = ["acceptance=typical"]


def settings_of(run: Path, bench: Path, words: list[str]) -> dict[str, Any]:
    cfg = load_config(EvalConfig, None, [f"bench={bench}", *words])
    paths = resolve_model(str(run), None, cfg.tree, lookup=cfg.lookup_choice)
    return measurement_settings(cfg, load_benchmark(cfg.bench).limited(cfg.limit), paths)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (SAMPLES, "seed=1"),
        (SAMPLES, "temperature=0.8"),
        (SAMPLES, "top_p=0.9"),
        (SAMPLES, "top_k=5"),
        (TYPICAL, "epsilon=0.2"),
        (TYPICAL, "delta=0.2"),
        ([], "acceptance=typical"),
        ([], "batch_size=2"),
        ([], "max_new_tokens=5"),
        ([], "limit=1"),
        ([], "dtype=bfloat16"),
        ([], "compile=true"),
        ([], "prompt_lookup=false"),
        ([], "assistant_model=small"),
        ([], "generate=false"),
        ([], "tree=none"),
        ([], "draft=prompt_lookup"),
        (["draft=prompt_lookup"], "lookup={max_ngram: 2}"),
    ],
)
def test_an_evaluation_is_resumed_with_equal_settings_only(
    run_dir: Path, bench_file: Path, words: list[str], change: str
) -> None:
    before = settings_of(run_dir, bench_file, words)
    assert settings_of(run_dir, bench_file, words) == before
    assert settings_of(run_dir, bench_file, [*words, change]) != before


def test_a_question_file_that_was_moved_or_extended(tmp_path: Path) -> None:
    here, there, longer = (tmp_path / name / "q.jsonl" for name in ("here", "there", "longer"))
    for path in (here, there, longer):
        path.parent.mkdir()
        write_bench(path)
    longer.write_text(longer.read_text() + '{"question_id": 4, "turns": ["Say no."]}')
    settings = [benchmark_settings(load_benchmark(str(path))) for path in (here, there, longer)]
    assert settings[0] == settings[1] != settings[2]
