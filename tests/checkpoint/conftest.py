"""The run directory of a random target model that evaluation is tested with, for finding and loading it
here.
"""

from tests.evaluation.conftest import run_dir, target_model_dir

__all__ = ["run_dir", "target_model_dir"]
