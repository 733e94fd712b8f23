"""What does a step over a tree cost on a CPU?"""

from __future__ import annotations

from result_tables.writing import Json, results, table


def over_plain(row: Json, step: str, plain: str = "plain") -> float:
    """Return the time of a step over the plain one of its row."""
    share: float = row["ms_and_floor"][step][0] / row["ms_and_floor"][plain][0]
    return share


def _compiled_bfloat16() -> list[Json]:
    """Return the rows that were compiled in bfloat16."""
    rows = results("decode")["rows"]
    return [row for row in rows if (row["dtype"], row["setting"]) == ("bfloat16", "compiled")]


def decode_answer() -> str:
    """Tree steps in compiled bfloat16."""
    shares = [over_plain(row, "tree 16") for row in _compiled_bfloat16()]
    single = [over_plain(row, "tree 1") for row in _compiled_bfloat16()]
    return (
        f"On a CPU, compiled in bfloat16, a tree of 16 nodes costs {min(shares):.1f} to"
        f" {max(shares):.1f} plain steps, and a tree of one node {min(single):.1f} to"
        f" {max(single):.1f}."
    )


def decode_short() -> str:
    """The same for the list of results."""
    shares = [over_plain(row, "tree 16") for row in _compiled_bfloat16()]
    return (
        f"The pass over 16 nodes, without heads: {min(shares):.1f} to {max(shares):.1f} plain steps,"
        " compiled, on a CPU."
    )


def decode_table() -> str:
    """The rows of the page: all at 128 positions, compiled bfloat16 at 1,024."""
    rows = []
    for row in results("decode")["rows"]:
        is_long = row["context"] == 1024
        if is_long and row not in _compiled_bfloat16():
            continue
        rows.append(
            [
                row["shape"],
                f"{row['context']:,}",
                row["dtype"],
                row["setting"],
                f"{row['ms_and_floor']['plain'][0]:.2f}",
                *(f"{over_plain(row, step):.2f}" for step in ("tree 1", "tree 16", "tree 64")),
                f"{row['ms_and_floor']['heads'][0]:.2f}",
                f"{over_plain(row, 'loop, tree 16', 'loop, plain'):.2f}",
                f"{over_plain(row, 'loop, tree 64', 'loop, plain'):.2f}",
            ]
        )
    head = ("shape", "context:", "dtype", "setting", "plain ms:", "tree 1:", "tree 16:", "tree 64:")
    return table((*head, "5 heads ms:", "loop, tree 16:", "loop, tree 64:"), rows)
