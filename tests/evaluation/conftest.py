from pathlib import Path

import pytest

from tests.evaluation.tiny_model import write_bench, write_run, write_target_model


@pytest.fixture(scope="session")
def target_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_model(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, target_model_dir: Path) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", target_model_dir)


@pytest.fixture
def bench_file(tmp_path: Path) -> Path:
    return write_bench(tmp_path / "small.jsonl")
