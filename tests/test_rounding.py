"""Division of sizes."""

import pytest

from medusa_train.rounding import ceil_div, round_up


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_a_part_that_is_not_full_counts(size: int, expected: int) -> None:
    assert ceil_div(size, 8) == expected
    assert round_up(size, 8) == 8 * expected
