"""Make the scripts under `data/seeds` and `data/tiny` importable by their own names, as when run as scripts."""

import sys
from pathlib import Path

import pytest

for _name in ("seeds", "tiny"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data" / _name))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tokenizer trained on the samples' own text."""
    import vocabulary
    from tiny_samples import MODULE, PROBLEM

    path = tmp_path_factory.mktemp("tokenizer")
    text = [MODULE, *PROBLEM.values(), "Add 12 and 345 and 6789."] * 3
    vocabulary.save_tokenizer(vocabulary.train_tokenizer(text, 400), path)
    return path
