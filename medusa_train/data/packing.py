"""Documents -> rows of a fixed length, by their lengths alone; knows no tokens and no tensors."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Lay whole documents into rows of at most `capacity` tokens, first-fit-decreasing.

    The longest document goes first, each into the first row that has room for it; among equal lengths the order
    of `lengths` decides. At most 11/9 of the fewest possible rows (plus one) are used, and on chats of many lengths
    next to no room is left over.

        capacity 10, lengths 4 7 3 6   ->   rows [7 3] [6 4], that is [[1, 2], [3, 0]]

    Rows are found by a tree over the room that each has left, so n documents take n log n steps.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        The rows, each a list of indices into `lengths`; every index stands in exactly one.

    Raises:
        ValueError: a document is empty or longer than a row.
    """
    if not lengths:
        return []
    if min(lengths) < 1 or max(lengths) > capacity:
        raise ValueError(f"documents must have 1 to {capacity} tokens, these have {min(lengths)} to {max(lengths)}")
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has children 2n and 2n + 1 and holds the larger of their rooms
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows
