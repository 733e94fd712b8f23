import io

from rich.console import Console

from medusa_train.pages.page import Table, number

TABLE = Table(
    ["category", "speed up", "name"],
    [["a|b", "1.27x (1.20-1.34)", "k=1"], ["all", "-", "k=2"]],
    overall=True,
)


def test_markdown_escapes_bars_and_sets_the_overall_row_in_bold() -> None:
    assert TABLE.markdown().splitlines() == [
        "| category | speed up | name |",
        "|---|---:|---:|",
        r"| a\|b | 1.27x (1.20-1.34) | k=1 |",
        "| **all** | **-** | **k=2** |",
    ]


def test_columns_without_text_are_left_out() -> None:
    table = Table.of_rows([{"a": "1", "b": "", "c": "-"}, {"a": "2", "b": "-", "c": "3"}])
    assert (table.titles, table.rows) == (["a", "c"], [["1", "-"], ["2", "3"]])


def shown(table: Table, width: int = 40) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return (
        "\n".join(" ".join(line.split()) for line in console.file.getvalue().splitlines())
        .strip()
        .splitlines()
    )


def test_the_terminal_shows_intervals_below_their_values_and_groups_rows() -> None:
    assert [line for line in shown(TABLE, 34) if "─" not in line] == [
        *["speed", "category up name", "a|b 1.27x k=1", "(1.20-1.34)", "", "all - k=2"]
    ]
    assert shown(Table(["n", "x"], [["1", "2"], ["1", "3"], ["2", "4"]]))[2:] == [
        "1 2",
        "1 3",
        "",
        "2 4",
    ]
    long = Table(["category", "speed"], [["a very long name of a category", "123456.7x"]])
    assert "123456.7x" in "".join(shown(long, 20))  # the name gives way
    wide = Table(
        ["category", *(f"{n} equal" for n in range(8))], [["a long category", *(["140/160"] * 8)]]
    )
    assert " ".join(shown(wide, 80)).count("140/160") == 8


def test_the_terminal_keeps_titles_and_intervals_on_one_line_where_the_width_is_there() -> None:
    lines = [line for line in shown(TABLE, 80) if "─" not in line]
    assert lines == ["category speed up name", "a|b 1.27x (1.20-1.34) k=1", "", "all - k=2"]


def test_a_number_has_its_digits_unit_and_interval() -> None:
    assert number(1.267, 2, "x", (1.2, 1.338)) == "1.27x (1.20-1.34)"
    assert (number(3.6, 0), number(None)) == ("4", "-")
