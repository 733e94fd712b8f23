"""Put the clone on the module path: the scripts run where the package is not installed, too."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
