"""What the tests of the tiny backbone share: a problem, a module, a recipe in miniature, random chats."""

from random import Random

from recipe import Recipe
from vocabulary import Encoded

PROBLEM = {
    "question": "Ada has 3 boxes of 12 pencils.\nHow many pencils is that?",
    "answer": "There are 3*12=<<3*12=36>>36 pencils.\n#### 36",
}


MODULE = '''
class Box:
    @staticmethod
    def label(self, text: str = "x", *rest, size=3, **more):
        """Return the label of the box.

        A second paragraph.
        """
        def inner():
            """Doc inside."""
            return 1
        return text * size

def undocumented(a):
    return a

def empty():
    """Do nothing at all."""
'''


TINY = Recipe(
    steps=6, hidden=32, head_dim=16, layers=2, intermediate=48, vocabulary=64, micro_batch=64, warmup=2, brief_steps=2
)


def chats(count: int, seed: int = 0) -> list[Encoded]:
    """Random chats of 5 to 20 tokens."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        size = rng.randint(5, 20)
        made.append(Encoded([rng.randrange(3, 64) for _ in range(size)], [i > 3 for i in range(size)]))
    return made
