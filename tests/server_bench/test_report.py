from pathlib import Path

from medusa_train.server_bench.metrics import summarize
from medusa_train.server_bench.report import write_report
from tests.server_bench.test_metrics import answer, cell


def test_the_page_shows_a_speed_in_large_only_where_heads_win(tmp_path: Path) -> None:
    cells = []
    for concurrency, seconds in ((1, 1.0), (8, 3.0)):
        plain = [answer(n, n * 10, 2) for n in range(4)]
        heads = [answer(n, n * 10, seconds) for n in range(4)]
        cells.append(cell("plain", plain, concurrency=concurrency, blocks=4))
        cells.append(cell("heads", heads, concurrency=concurrency, blocks=4))
    meta = {"bench": "b", "model": "m", "turns": "in turns", "questions": 4, "date": "today"}
    report = {"meta": {**meta, "max_new_tokens": 8, "notes": []}, **summarize(cells, greedy=True)}
    write_report(report, cells, tmp_path)
    page = (tmp_path / "served.html").read_text(encoding="utf-8")
    assert "<b>2.00x with heads</b><span>concurrency 1</span>" in page
    assert "<b>off</b><span>concurrency 8</span>" in page
