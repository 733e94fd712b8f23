"""Integer division, rounded up."""


def ceil_div(size: int, part: int) -> int:
    """Return `size / part`, rounded up."""
    return -(-size // part)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple
