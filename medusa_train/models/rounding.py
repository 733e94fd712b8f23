"""Division of sizes."""


def ceil_div(size: int, part: int) -> int:
    """Return how many parts of `part` cover `size`: their quotient, rounded up."""
    return -(-size // part)
