"""What do training and its text cost?"""

from __future__ import annotations

from result_tables.writing import Cells, Json, results, speed, table, times


def train_pairs() -> list[tuple[str, str, Json, Json]]:
    """Return case, dtype, and stacked and own logits."""
    cases = results("train")["loss"]["cases"]
    pairs = []
    for stacked, own in zip(cases[::2], cases[1::2], strict=True):
        heads = stacked.get("heads", 5)
        title = f"loss, {heads} head{'s' if heads > 1 else ''}"
        title += ", half masked" if "masked" in stacked else ""
        pairs.append((title, stacked.get("dtype", "float32"), stacked, own))
    return pairs


def train_answer() -> str:
    """Memory and time with five heads."""
    five = [(stacked, own) for title, _, stacked, own in train_pairs() if title == "loss, 5 heads"]
    memory = [own["peak_mb"] / stacked["peak_mb"] for stacked, own in five]
    faster = [stacked["seconds"] / own["seconds"] for stacked, own in five]
    return (
        f"With five heads the loss takes {min(memory):.2f} to {max(memory):.2f} of the memory of"
        f" stacked logits, and no more with more heads. It is {min(faster):.1f} to {max(faster):.1f}"
        " times as fast."
    )


def train_short() -> str:
    """The same for the list of results."""
    five = [(stacked, own) for title, _, stacked, own in train_pairs() if title == "loss, 5 heads"]
    memory = [own["peak_mb"] / stacked["peak_mb"] for stacked, own in five]
    return (
        f"On a CPU the loss of five heads needs {min(memory):.0%} to {max(memory):.0%} of the memory"
        " that the logits of all heads would take."
    )


def train_table() -> str:
    """Time and peak of the loss."""
    rows = []
    for title, dtype, stacked, own in train_pairs():
        rows.append(
            [
                title,
                dtype,
                f"{stacked['seconds']:.2f} s",
                f"{own['seconds']:.2f} s",
                times(stacked["seconds"] / own["seconds"]),
                f"{stacked['peak_mb']:,}",
                f"{own['peak_mb']:,}",
            ]
        )
    head = ("case", "dtype", "stacked:", "here:", "faster:", "stacked MB:", "here MB:")
    return table(head, rows)


def selfdistill_rates() -> dict[str, list[float]]:
    """Return tokens per second in batches of 1, 8 and 32, by engine."""
    machine = results("selfdistill")["forced_third_machine"]
    single = machine["batch_1"]["rates"]
    batches = machine["batches_32_8"]["rates"]
    names = {
        "medusa-train, not compiled": "not compiled, processes: 1",
        "medusa-train, compiled": "compiled, processes: 1",
        "vLLM": "vLLM",
    }
    rates = {}
    for title, key in names.items():
        rates[title] = [single[key]["1"], batches[key]["8"], batches[key]["32"]]
    return rates


def _over_vllm() -> list[float]:
    """Return compiled speeds over vLLM's, in batches of 1, 8 and 32."""
    rates = selfdistill_rates()
    pairs = zip(rates["medusa-train, compiled"], rates["vLLM"], strict=True)
    return [compiled / vllm for compiled, vllm in pairs]


def selfdistill_answer() -> str:
    """Compiled, beside vLLM."""
    one, eight, many = _over_vllm()
    return (
        f"Compiled, on a CPU, it makes {one:.2f} times vLLM's tokens per second one at a time,"
        f" {eight:.2f} times in batches of 8, and {many:.2f} times in batches of 32, where padding"
        " costs the rest."
    )


def selfdistill_short() -> str:
    """The same for the list of results."""
    one, _, many = _over_vllm()
    return (
        f"On a CPU, compiled, {one:.2f} times as fast as vLLM one at a time, {many:.2f} times in"
        " batches of 32."
    )


def selfdistill_table() -> str:
    """Engines by batch."""
    rows: list[Cells] = []
    for name, rates in selfdistill_rates().items():
        rows.append([name, *(speed(rate) for rate in rates)])
    rows.append(["compiled / vLLM", *(f"{share:.2f}" for share in _over_vllm())])
    return table(("engine", "batch of 1:", "8:", "32:"), rows)
