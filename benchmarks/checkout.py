"""Put the clone on the module path, so that the scripts also run without installing the package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
