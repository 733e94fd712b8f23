from pathlib import Path

import pytest

from tests.evaluation.tiny_model import write_backbone, write_bench, write_run


@pytest.fixture(scope="session")
def backbone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, backbone_dir: Path) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", backbone_dir)


@pytest.fixture
def bench_file(tmp_path: Path) -> Path:
    return write_bench(tmp_path / "small.jsonl")
