"""The package on a pretend CUDA device, in processes of their own: no mixed devices, and no more
waits than named.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend device is built with g++")
@pytest.mark.skipif(
    torch.version.cuda is not None and torch.cuda.is_available(), reason="there is a real device"
)
@pytest.mark.parametrize("name", ["decoding", "training"])
def test_on_a_pretend_gpu(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.cuda_shadow.device",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "no:xdist", f"tests/cuda_shadow/{name}.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
