"""Make the scripts under `data/tiny` importable by their own names, as when run as scripts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data" / "tiny"))

MODULE = '''
class Box:
    @staticmethod
    def label(self, text: str = "x", *rest, size=3, **more):
        """Return the label of the box.

        A second paragraph.
        """
        def inner():
            """Doc inside."""
            return 12345
        return text * size + str(inner()) + str(size) + str(rest) + str(more) + str(self)

def undocumented(a):
    return a

def empty():
    """Do nothing at all."""
'''


@pytest.fixture(scope="session")
def module() -> str:
    """The source of a module with one usable function, `label`."""
    return MODULE
