"""The device of a test: the CPU, or a GPU for tests marked `gpu`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Both devices in turn, so that a machine without a GPU runs the test's code."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine trains on its GPU")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The GPU, for tests of what a CPU does not have; they are marked `gpu`."""
    return torch.device("cuda")
