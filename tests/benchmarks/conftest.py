"""Makes the scripts under `benchmarks` importable by their own names, as they are when run as
scripts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
