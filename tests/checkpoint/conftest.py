"""The run directory of a random backbone that evaluation is tested with, for finding and loading it
here.
"""

from tests.evaluation.conftest import backbone_dir, run_dir

__all__ = ["backbone_dir", "run_dir"]
