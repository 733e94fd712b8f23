"""How fast is it on a GPU?"""

from __future__ import annotations

from result_tables.writing import Json, equal_in_bfloat16, results, speed, table, times


def over_plain(row: Json, step: str, plain: str = "plain") -> float:
    """Return the time of a step over the plain one of its row."""
    share: float = row["ms_and_floor"][step][0] / row["ms_and_floor"][plain][0]
    return share


def gpu_rows() -> list[tuple[str, int, Json]]:
    """Return setting, context and the times of the steps at 7B shape."""
    content = results("gpu")
    after = content["after"]["attention_by_products"]
    rows = []
    for number in (0, 1):
        for name, key in (("torch's kernel", "torch_kernel"), ("products", "products")):
            row = after[key][number]
            rows.append((f"CUDA graphs, {name}", row["context"], row))
    compiled = content["steps"]["decode-compiled"]["figures"]["rows"][0]
    eager = content["steps"]["decode-7b"]["figures"]["rows"][0]
    rows.append(("compiled, torch's kernel", compiled["context"], compiled))
    rows.append(("eager, torch's kernels", eager["context"], eager))
    return rows


def gpu_answer() -> str:
    """SmolLM2 by the clock, and the cost of a tree at 7B shape."""
    shares = [over_plain(row, "loop, tree 64", "loop, plain") for _, _, row in gpu_rows()[:-1]]
    return (
        f"Yes. On one H100 {_gpu_speeds()}. At 7B shape a step over 64 nodes costs"
        f" {min(shares):.2f} to {max(shares):.2f} plain steps, depending on context and compilation."
    )


def gpu_short() -> str:
    """The same for the list of results."""
    return f"On one H100 with CUDA graphs {_gpu_speeds()}."


def _gpu_speeds() -> str:
    """SmolLM2 with each of the two drafts that ran on the GPU."""
    clock = results("gpu")["after"]["smollm2_by_the_clock"]
    speeds = []
    for draft, key in (("Medusa-1 and a Markov bias", "medusa1"), ("EAGLE-3", "eagle3")):
        run = clock[key]
        speeds.append(
            f"{times(run['speedup'])} as fast with {draft} ({speed(run['baseline_tokens_per_s'])} to"
            f" {speed(run['tokens_per_s'])} tokens/s)"
        )
    return f"SmolLM2 is {' and '.join(speeds)}"


def gpu_table() -> str:
    """Milliseconds of steps at 7B shape."""
    rows = []
    for name, context, row in gpu_rows():
        times_ms = row["ms_and_floor"]
        plain, floor = times_ms["plain"]
        steps = ("tree 64", "loop, plain", "loop, tree 16", "loop, tree 64")
        rows.append(
            [
                name,
                f"{context:,}",
                f"{plain:.1f} ms",
                f"{plain / floor:.2f}x",
                *(f"{times_ms[step][0]:.1f} ms" for step in steps),
                f"{over_plain(row, 'loop, tree 64', 'loop, plain'):.2f}",
            ]
        )
    head = ("setting, attention", "context:", "plain pass:", "over byte floor:", "pass, 64 nodes:")
    loops = ("plain loop:", "loop, 16 nodes:", "loop, 64 nodes:", "64 nodes over plain loop:")
    return table((*head, *loops), rows)


def gpu_clock_table() -> str:
    """SmolLM2 on the H100 by the clock."""
    rows = []
    clock = results("gpu")["after"]["smollm2_by_the_clock"]
    for name, key in (("Medusa-1, Markov bias", "medusa1"), ("EAGLE-3", "eagle3")):
        run = clock[key]
        rows.append(
            [
                name,
                f"{run['acceleration_rate']:.2f}",
                f"{run['overhead']:.2f}",
                speed(run["baseline_tokens_per_s"]),
                speed(run["tokens_per_s"]),
                times(run["speedup"], run["intervals"]["speedup"]),
                times(run["speedup_without_loops"]),
                equal_in_bfloat16(run),
                f"{run['looping_answers']}/{run['answers']}",
            ]
        )
    head = ("draft", "tokens per step:", "overhead:", "plain tokens/s:", "tokens/s:", "ratio:")
    return table((*head, "without loops:", "equal bf16:", "loops:"), rows)


def gpu_training_table() -> str:
    """Training steps at 7B shape on the H100."""
    content = results("gpu")
    one, two = content["steps"]["train-7b"]["figures"]["cases"]
    many = content["after"]["medusa2_8_rows"]
    rows = []
    for title, case, tokens in (
        ("Medusa-1, target model in bfloat16", one, one["tokens_counted"]),
        ("Medusa-2, QLoRA with gradient checkpointing", two, two["tokens_counted"]),
        ("the same with 8 rows", many, many["tokens"]),
    ):
        rows.append(
            [
                title,
                f"{tokens / case['seconds']:,.0f}",
                f"{case['mfu']:.2f}",
                f"{case['total_mb'] / 1000:.1f} GB",
                f"{case['estimate_mb'] / 1000:.1f} GB",
            ]
        )
    head = ("what", "tokens/s:", "of the measured matrix rate:", "memory:", "by `--inspect`:")
    return table(head, rows)
