"""What would a large model gain? What trees bring and cost, and the estimate for 7B."""

from __future__ import annotations

from result_tables.gpu import gpu_rows, over_plain
from result_tables.writing import Cells, results, table


def trees_table() -> str:
    """What trees of growing size bring and cost: guesses of SmolLM2, steps on a CPU and on an H100."""
    guesses = results("drafts_smollm2")["both_texts"]["medusa1"]
    cpu = results("studies")["removed_pages"]["step_of_160m"]
    h100 = next(row for name, _, row in gpu_rows() if name == "CUDA graphs, products")
    overheads = {}
    for nodes in (16, 64):
        costs = [over_plain(row, f"loop, tree {nodes}", "loop, plain") for row in (cpu, h100)]
        overheads[nodes] = [f"{cost:.2f}" for cost in costs]
    rows: list[Cells] = [
        ["none: plain decoding", "1.00", "1.00", "1.00"],
        ["chain of 3", f"{guesses['chain']:.2f}", "-", "-"],
        ["16 nodes", f"{guesses['16']:.2f}", *overheads[16]],
        ["32 nodes", f"{guesses['32']:.2f}", "-", "-"],
        ["64 nodes", "-", *overheads[64]],
    ]
    head = (
        "tree",
        "tokens per step, Medusa-1 of SmolLM2:",
        "overhead with heads, 160M on a CPU, compiled:",
        "overhead, 7B on an H100, CUDA graphs:",
    )
    return table(head, rows)


def _tokens_per_step_on_gpu() -> float:
    """Return what Medusa-1 of SmolLM2 makes on the H100."""
    rate: float = results("gpu")["after"]["smollm2_by_the_clock"]["medusa1"]["acceleration_rate"]
    return rate


def _costs_7b() -> list[float]:
    """Return what steps over 64 nodes cost at 7B shape, over plain ones, if they are not eager."""
    measured = [row for name, _, row in gpu_rows() if not name.startswith("eager")]
    return [over_plain(row, "loop, tree 64", "loop, plain") for row in measured]


def estimate_range_7b() -> tuple[float, float]:
    """Return the least and the largest speedup of the estimate at 7B shape."""
    per_step = _tokens_per_step_on_gpu()
    costs = _costs_7b()
    low = per_step / max(costs)
    high = per_step / min(costs)
    return low, high


def estimate_7b() -> str:
    """What heads would give at 7B shape if they guessed as well as SmolLM2's."""
    per_step = _tokens_per_step_on_gpu()
    costs = _costs_7b()
    low, high = estimate_range_7b()
    return (
        f"**An estimate, not a measurement: {low:.1f}x to {high:.1f}x, one answer at a time on an"
        " H100.** It has three conditions:\n\n"
        f"1. The heads make {per_step:.2f} tokens per step, as SmolLM2's made on that GPU with 63 nodes."
        " Those had a Markov bias, which is off by default. Yours may make more or fewer.\n"
        f"2. A step over 64 nodes costs {min(costs):.2f} to {max(costs):.2f} plain steps, as measured"
        " with random weights of Llama 2 7B's shape: the least at 1,024 positions, compiled, the most at"
        " 4,096 positions, not compiled.\n"
        "3. The vocabulary has 32,000 tokens. Heads over the 128,256 tokens of Llama 3 cost more,"
        " unless `medusa_vocab_size` restricts them."
    )
