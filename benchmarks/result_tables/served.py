"""Does a draft make a vLLM server faster?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from result_tables.writing import Cells, Json, results, speed, table, times


def served_grid() -> dict[int, dict[str, Json]]:
    """Return the cells of greedy serving by concurrency and server."""
    content = results("served")
    grid: dict[int, dict[str, Json]] = {}
    for values in content["greedy"]:
        cell = dict(zip(content["columns"], values, strict=True))
        grid.setdefault(cell["concurrency"], {})[cell["server"]] = cell
    return grid


def served_cells(cells: Sequence[Json], server: str) -> dict[int, Json]:
    """Return the cells of `server` by concurrency, each with the speed of the plain one before it."""
    chosen = {}
    for before, cell in pairwise(cells):
        if cell["server"] == server:
            chosen[cell["concurrency"]] = cell | {"plain_tokens_per_s": before["tokens_per_s"]}
    return chosen


def _by_concurrency(session: Json) -> dict[int, Json]:
    """Return the cells of a session of one server by concurrency."""
    return {cell["concurrency"]: cell for cell in session["cells"]}


def served_ratio(cell: Mapping[str, Any]) -> str:
    """Write the ratio of a served cell with its interval."""
    return times(cell["ratio"], cell.get("interval") or cell["ratio_interval"])


def served_answer() -> str:
    """One guess at a time, by concurrency."""
    grid = served_grid()
    late = [cells["k=1"]["ratio"] for concurrency, cells in grid.items() if concurrency >= 4]
    return (
        f"Not clearly. On two cores of an AMD EPYC Medusa-1 heads make a server"
        f" {served_ratio(grid[1]['k=1'])} as fast with one request at a time, and"
        f" {min(late):.2f}x to {max(late):.2f}x with four or more. vLLM verifies one chain instead of"
        " a tree."
    )


def served_short() -> str:
    """Medusa-1, lookup and all sessions of EAGLE-3 with one request at a time."""
    content = results("eagle3_smollm2")
    eagle3 = [
        served_cells(content["served"]["cells"], "k=2")[1],
        served_cells(content["served_four_epochs"]["cells"], "k=2")[1],
        _by_concurrency(content["served_both_texts"])[1],
    ]
    medusa1 = [served_grid()[1]["k=1"], _by_concurrency(content["served_medusa1_both_texts"])[1]]
    first, second, third = (times(cell["ratio"]) for cell in eagle3)
    one, other = (times(cell["ratio"]) for cell in medusa1)
    return (
        f"SmolLM2 on a CPU, one request: Medusa-1 {one} and {other} (no clear gain), EAGLE-3 {first}, {second} and"
        f" {third}. With eight at a time neither helps."
    )


def served_table() -> str:
    """Ratios by concurrency and number of draft tokens."""
    rows = []
    for concurrency, cells in served_grid().items():
        row: Cells = [concurrency, speed(cells["plain"]["tokens_per_s"])]
        row += [served_ratio(cells[f"k={count}"]) for count in (1, 2, 3, 4)]
        wins = [count for count in (1, 2, 3, 4) if cells[f"k={count}"]["verdict"] == "wins"]
        row.append(f"N = {wins[0]}" if wins else "off")
        rows.append(row)
    head = (
        "requests at a time:",
        "plain tokens/s:",
        "N = 1:",
        "N = 2:",
        "N = 3:",
        "N = 4:",
        "serve:",
    )
    return table(head, rows)


def eagle3_served_table() -> str:
    """Every session of EAGLE-3 in vLLM, with Medusa-1 of the same text."""
    content = results("eagle3_smollm2")
    four = content["served_four_epochs"]
    xeon = content["served"]
    sessions: list[tuple[str, dict[int, Json]]] = [
        ("EAGLE-3, text without loops, 2 tokens, Xeon", served_cells(xeon["cells"], "k=2")),
        ("EAGLE-3, one epoch, 2 tokens", _by_concurrency(content["served_both_texts"])),
        ("EAGLE-3, four epochs, 2 tokens", served_cells(four["cells"], "k=2")),
        ("EAGLE-3, four epochs, 3 tokens", served_cells(four["cells"], "k=3")),
        ("Medusa-1, one epoch, 1 token", _by_concurrency(content["served_medusa1_both_texts"])),
    ]
    rows = []
    for name, cells in sessions:
        row: Cells = [name, f"{cells[1]['tokens_per_step']:.2f}"]
        for concurrency in (1, 2, 4, 8):
            cell = cells.get(concurrency)
            if cell is None:
                row.append("-")
                continue
            row.append(f"{speed(cell['plain_tokens_per_s'])}, {served_ratio(cell)}")
        rows.append(row)
    head = ("draft", "per step:", "1 request: plain tokens/s, ratio:", "2:", "4:", "8:")
    return table(head, rows)
