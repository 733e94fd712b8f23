"""Division of sizes."""


def ceil_div(size: int, part: int) -> int:
    """Return `size / part`, rounded up."""
    return -(-size // part)
