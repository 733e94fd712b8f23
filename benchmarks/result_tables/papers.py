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


def published_speeds_table() -> str:
    """The speeds of the papers' tables beside those of SmolLM2, for docs/explanation/papers.md."""
    experiments = results("papers_speed_smollm2")["experiments"]
    kangaroo = experiments["kangaroo_table1"]["rows"]
    drafts = ("Kangaroo", "REST", "Medusa", "Lookahead")
    greedy = experiments["amphista_table3"]["rows"]["Amphista, acceptance greedy"]
    value, *interval = greedy["speedup"]
    few, many = (
        experiments[f"amphista_table6, {nodes}"]["rows"]["Amphista"][nodes][0]
        for nodes in ("22 nodes", "64 nodes")
    )
    rows: list[Cells] = [
        [
            "`kangaroo_table1`",
            f"{', '.join(drafts)} (Spec-Bench)",
            "1.50x, 1.43x, 1.41x, 1.29x",
            ", ".join(times(kangaroo[name]["average"]) for name in drafts),
        ],
        [
            "`amphista_table3`",
            "Amphista (CNN/DM, greedy)",
            "2.15x; ROUGE-1 18.70, without a draft 18.74",
            f"{times(value, interval)}; ROUGE-1 {greedy['ROUGE-1']:.2f}, without a draft"
            f" {greedy['plain ROUGE-1']:.2f}. Answers equal in float32:"
            f" {greedy['equal to plain decoding']} of {greedy['answers']}, in bfloat16:"
            f" {greedy['equal bf16']} of {greedy['answers']}",
        ],
        [
            "`amphista_table6`",
            "Amphista with 22 and with 64 nodes",
            "2.29x, 2.44x",
            f"{times(few)}, {times(many)}",
        ],
    ]
    return table(("NAME", "drafts or trees", "published, 7B", "SmolLM2"), rows)


def published_acceptance_table() -> str:
    """What the papers publish where SmolLM2 was counted in tokens per step, for docs/explanation/papers.md."""
    counted = results("papers_smollm2")["experiments"]
    joint = results("medusa2_smollm2")["finished_heads"]["rows"].values()
    over_medusa1 = [row["over (32)"][0] for row in joint if row["over (32)"]]
    stages = counted["medusa_table2"]["rows"]
    heads, two, one = (
        stages[name] for name in ("Medusa-1", "Medusa-2, two stages", "Medusa-2, one stage")
    )
    trees = counted["medusa_fig6"]["rows"]
    sparse = trees["sparse trees, sparse:63"]
    dense = trees["random dense trees, dense:10x8x2"]
    typical = results("papers_speed_smollm2")["experiments"]["medusa_fig7"]["rows"]
    strict, loose = (
        typical[f"typical, epsilon {epsilon}"]["acceleration rate"][0] for epsilon in (0.01, 0.25)
    )
    kangaroo = {
        name: row.get("over", [1.0])[0] for name, row in counted["kangaroo_table2"]["rows"].items()
    }
    chains = counted["kangaroo_fig3"]["rows"]
    never, early = (
        chains[f"exit after 2 layers, chain:6, threshold {threshold}"]["compression rate"]
        for threshold in (0.0, 0.6)
    )
    exits = [row["compression rate"] for name, row in chains.items() if name.endswith(", layers")]
    table4 = counted["amphista_table4"]["rows"]
    over = {name: row["over Amphista"][0] for name, row in table4.items() if name != "Amphista"}
    again = counted["amphista_table4_seed_43"]["rows"]["w/o Staged-Adaptation, counted"]
    top1 = counted["amphista_fig1"]["rows"]
    first, last = (
        top1["Amphista"][f"head {head}, top 1"] - top1["Medusa"][f"head {head}, top 1"]
        for head in (1, 4)
    )
    rows: list[Cells] = [
        [
            "`medusa_table1`",
            "speed (Table 2): Medusa-1 2.18x, Medusa-2 2.83x. Medusa-2: 3.47 tokens per step,"
            " overhead 1.22",
            f"tokens per step: Medusa-2 makes [{min(over_medusa1):.2f} to {max(over_medusa1):.2f} of"
            " Medusa-1's](../results/medusa2_smollm2.md)",
        ],
        [
            "`medusa_table2`",
            "quality (a judge's grade): original model 6.17, two stages 6.18, direct 5.925",
            f"perplexity: original model {two['perplexity before']:.2f}, two stages"
            f" {two['perplexity after']:.2f}, one stage {one['perplexity after']:.2f}. Tokens per step:"
            f" heads alone {heads['acceleration rate'][0]:.2f}, two stages"
            f" {two['acceleration rate'][0]:.2f}, one stage {one['acceleration rate'][0]:.2f}",
        ],
        [
            "`medusa_fig6`",
            "claim: 64 sparse nodes beat 256 dense ones",
            f"tokens per step: {sparse['nodes']} sparse nodes {sparse['acceleration rate']:.2f},"
            f" {dense['nodes']} dense ones {dense['acceleration rate']:.2f}",
        ],
        [
            "`medusa_fig7`",
            "claim: a larger epsilon gives better and slower answers",
            f"tokens per step: {strict:.2f} with 0.01, {loose:.2f} with 0.25",
        ],
        [
            "`kangaroo_table2`",
            "speed: Kangaroo 1.50x, own head 1.44x, whole layer 1.37x, MLP only 1.22x",
            f"tokens per step over Kangaroo's: own head {kangaroo['Kangaroo + Head']:.2f}, whole layer"
            f" {kangaroo['1-Layer Transformer']:.2f}, MLP only {kangaroo['MLP Only']:.2f}",
        ],
        [
            "`kangaroo_fig3`",
            "claim: best at exit 2, threshold 0.6, 6 tokens",
            f"tokens per step: {never:.3f} with threshold 0, {early:.3f} with 0.6;"
            f" {min(exits):.3f} to {max(exits):.3f} for exits after layers 1 to 5",
        ],
        [
            "`amphista_table1`",
            "speed: Amphista 2.44x, Hydra++ 2.37x, Medusa 1.87x",
            f"tokens per step over Amphista's: Hydra++ {over['Hydra++']:.2f}, Medusa"
            f" {over['Medusa']:.2f}",
        ],
        [
            "`amphista_table4`",
            "speed: Amphista 2.44x, without adaptation 2.14x",
            f"tokens per step over Amphista's: without adaptation"
            f" {over['w/o Staged-Adaptation']:.2f} and {again['over Amphista'][0]:.2f} (two seeds),"
            f" without token {over['w/o Sampled-Token']:.2f}",
        ],
        [
            "`amphista_fig1`",
            "claim: the last two heads gain most",
            f"top-1 over Medusa's: head 1 {first:+.2f}, head 4 {last:+.2f}",
        ],
    ]
    return table(("NAME", "published, 7B", "SmolLM2"), rows)
