"""Does what the papers say hold on SmolLM2?"""

from __future__ import annotations

from result_tables.writing import Cells, millions, ratio, results, table, times, two_digits


def papers_answer() -> str:
    """Amphista's and Kangaroo's ablations."""
    rows = results("papers_smollm2")["experiments"]["amphista_table4"]["rows"]
    token = rows["w/o Sampled-Token"]["over Amphista"][0]
    return (
        f"In part, after short training. Amphista needs its sampled token, as published: without it,"
        f" {token:.2f} of its tokens per step. Its staged adaptation brings little here and its"
        " auto-embedding nothing. Kangaroo's variants differ by a few percent."
    )


def papers_short() -> str:
    """The same for the list of results."""
    return (
        "In part, after short training: Amphista's sampled token helps, its adaptation little, its"
        " auto-embedding not."
    )


#: Row of the JSON, its title, and the published speedup over the full draft (Vicuna-7B).
_AMPHISTA = (
    ("w/o Auto-embedding", "without auto-embedding", "0.94"),
    ("w/o Position-Encoding", "without position encoding", "0.99"),
    ("w/o Staged-Adaptation", "without staged adaptation", "0.88"),
    ("w/o Staged-Adaptation, counted", "without staged adaptation, another seed", "0.88"),
    ("w/ One-Adaptation-Layer", "with one adaptation layer", "0.95"),
    ("w/o Sampled-Token", "without sampled token", "0.92"),
    ("Medusa", "Medusa", "0.76"),
    ("Hydra++", "Hydra++", "0.97"),
)
#: The same for Kangaroo, without the number of parameters in the title.
_KANGAROO = (
    ("Kangaroo + Head", "with its own head", "0.96"),
    ("1-Layer Transformer", "1-layer transformer", "0.91"),
    ("MLP Only", "MLP only", "0.81"),
)


def papers_table() -> str:
    """Amphista's Table 4 and Kangaroo's Table 2."""
    experiments = results("papers_smollm2")["experiments"]

    # 1. Amphista; without staged adaptation it was trained twice
    amphista = dict(experiments["amphista_table4"]["rows"])
    amphista |= experiments["amphista_table4_seed_43"]["rows"]
    length = amphista["Amphista"]["accepted length"]
    rows: list[Cells] = [["Amphista (Table 4)", f"{length:.2f}", "-", "-"]]
    for name, title, published in _AMPHISTA:
        row = amphista[name]
        shown = two_digits(row["over Amphista"])
        rows.append([title, f"{row['accepted length']:.2f}", shown, published])

    # 2. Kangaroo
    kangaroo = experiments["kangaroo_table2"]["rows"]
    full = kangaroo["Kangaroo"]
    title = f"Kangaroo (Table 2), {millions(full['parameters'])} parameters"
    rows.append([title, f"{full['acceleration rate']:.2f}", "-", "-"])
    for name, title, published in _KANGAROO:
        row = kangaroo[name]
        title = f"{title}, {millions(row['parameters'])}"
        rows.append([title, f"{row['acceleration rate']:.2f}", two_digits(row["over"]), published])
    head = ("draft", "tokens per step:", "over the full draft:", "published speedup over it:")
    return table(head, rows)


def papers_speed_answer() -> str:
    """The order of the paper is not that of a small model on a CPU."""
    rows = results("papers_speed_smollm2")["experiments"]["kangaroo_table1"]["rows"]
    return (
        f"Not on a CPU with 135M parameters. On Spec-Bench Lookahead makes"
        f" {times(rows['Lookahead']['average'])} plain decoding and Medusa"
        f" {times(rows['Medusa']['average'])}, while REST and Kangaroo are slower than plain decoding."
    )


def papers_speed_short() -> str:
    """The same for the list of results."""
    rows = results("papers_speed_smollm2")["experiments"]["kangaroo_table1"]["rows"]
    figures = ", ".join(
        f"{name} {times(rows[name]['average'])}"
        for name in ("Lookahead", "Medusa", "REST", "Kangaroo")
    )
    return f"Not on a CPU, nothing compiled: {figures}."


def papers_speed_table() -> str:
    """Kangaroo's Table 1, and what it published."""
    content = results("papers_speed_smollm2")
    rows = content["experiments"]["kangaroo_table1"]["rows"]
    published = {"Lookahead": "1.40x", "Medusa": "1.55x", "REST": "1.58x", "Kangaroo": "1.68x"}
    cells = []
    for name, shown in published.items():
        row = rows[name]
        count, *count_interval = row["MT-Bench CR"]
        value, *interval = row["MT-Bench"]
        cells.append(
            [
                name,
                ratio(count, count_interval, 2),
                times(value, interval),
                shown,
                times(row["average"]),
                times(content["chart"]["published"][name]),
            ]
        )
    head = ("draft", "tokens per step, MT-Bench:", "ratio, MT-Bench:", "published:")
    return table((*head, "ratio, average of Spec-Bench:", "published:"), cells)


def nodes_table() -> str:
    """Medusa, Figure 6: the sparse trees."""
    trees = results("papers_smollm2")["experiments"]["medusa_fig6"]["rows"]
    sparse = [row for name, row in trees.items() if name.startswith("sparse")]
    dense = trees["random dense trees, dense:10x8x2"]
    head = ["sparse nodes", *(f"{row['nodes']}:" for row in sparse), f"dense, {dense['nodes']}:"]
    values = [f"{row['acceleration rate']:.2f}" for row in [*sparse, dense]]
    return table(head, [["tokens per step", *values]])


def table6_table() -> str:
    """Amphista, Table 6."""
    experiments = results("papers_speed_smollm2")["experiments"]
    few = experiments["amphista_table6, 22 nodes"]["rows"]
    many = experiments["amphista_table6, 64 nodes"]["rows"]
    rows = []
    for name in ("Medusa", "Amphista", "Hydra++"):
        small, *small_interval = few[name]["22 nodes"]
        large, *large_interval = many[name]["64 nodes"]
        rows.append(
            [
                name,
                f"{few[name]['tokens per step of 22 nodes'][0]:.2f}",
                times(small, small_interval),
                f"{many[name]['of 64 nodes'][0]:.2f}",
                times(large, large_interval),
            ]
        )
    head = ("draft", "22 nodes: per step:", "ratio:", "64 nodes: per step:", "ratio:")
    return table(head, rows)


def epsilon_table() -> str:
    """Medusa, Figure 7."""
    rows = results("papers_speed_smollm2")["experiments"]["medusa_fig7"]["rows"]
    head = ["rule"]
    cells: Cells = ["tokens per step"]
    for name, row in rows.items():
        head.append(f"{name.removeprefix('typical, ')}:")
        cells.append(f"{row['acceleration rate'][0]:.2f}")
    return table(head, [cells])
