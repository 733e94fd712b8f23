import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from medusa_train.pages.charts import COLOURS, Bar, Curve, bars, curves, tree_drawing


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> set[str | None]:
    return {node.text for node in parsed(svg).iter("text")}


def tips(svg: str) -> dict[str, str]:
    """Return what is drawn, up to the end of its group, by tooltip."""
    return dict(re.findall(r"<title>(.*?)</title>(.*?)</g>", svg, flags=re.DOTALL))


def drawn_bars() -> str:
    return bars(
        [("a<b", [Bar(1.0, (0.8, 1.3))]), ("c", [Bar(2.0)]), ("d", [Bar(None)])],
        "speed",
        unit="x",
        reference=1,
    )


def drawn_curves() -> str:
    drawn = [Curve("one", [(1, 0.5), (2, 0.25)], marked=[2]), Curve("two", [(1, 0.4), (2, 0.2)])]
    return curves(drawn, "a <label>", "x")


def drawn_tree() -> str:
    return tree_drawing([(0,), (1,), (0, 0), (0, 1), (1, 0)], [0.5, 0.2, 0.25, 0.04, 0.004])


CHARTS = {"bars": drawn_bars, "curves": drawn_curves, "tree": drawn_tree}


@pytest.mark.parametrize("draw", CHARTS.values(), ids=list(CHARTS))
def test_a_chart_can_be_read_on_a_light_and_on_a_dark_page(draw: Callable[[], str]) -> None:
    """Each of its colours is a variable of the page."""
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]*)", draw())) <= {
        "none",
        *(f"var({variable})" for variable in COLOURS),
    }


@pytest.mark.parametrize("draw", CHARTS.values(), ids=list(CHARTS))
def test_several_charts_of_a_page_have_no_name_or_style_in_common(draw: Callable[[], str]) -> None:
    svg = draw()
    assert "<style" not in svg
    assert "url(" not in svg
    names = {node.get("id") for node in parsed(svg).iter() if node.get("id")}
    assert all(name and name.startswith("m") for name in names)  # of markers, by their content


def test_screen_readers_get_a_label() -> None:
    assert parsed(drawn_curves()).get("aria-label") == "a <label>"
    assert parsed(drawn_curves()).get("role") == "img"


def test_bars_are_as_long_as_their_values() -> None:
    lengths = {}
    for name, shape in tips(drawn_bars()).items():
        corners = re.findall(r"[ML] ([\d.]+) [\d.]+", shape)
        lengths[name.partition(":")[0]] = float(corners[1]) - float(corners[0])
    assert lengths["c"] == pytest.approx(2 * lengths["a&lt;b"], rel=0.01)
    assert lengths["reference"] == 0


def test_whiskers_end_at_the_bounds_of_their_interval() -> None:
    svg = drawn_bars()
    (bar,) = (shape for name, shape in tips(svg).items() if name.startswith("a&lt;b"))
    start, end = map(float, re.findall(r"[ML] ([\d.]+)", bar)[:2])  # 0 and 1
    line = r"M ([\d.]+) [\d.]+ L ([\d.]+) [\d.]+ \" style=\"fill: none; stroke: var\(--ink\)"
    (ends,) = re.findall(line, " ".join(svg.split()))
    bounds = [(float(place) - start) / (end - start) for place in ends]
    assert bounds == pytest.approx([0.8, 1.3], abs=0.01)


def test_bars_have_names_values_and_intervals() -> None:
    svg = drawn_bars()
    assert {"a<b", "1.00x", "2.00x", "not measured"} <= texts(svg)
    assert "a&lt;b: 1.00x (95 % interval 0.80-1.30)" in tips(svg)
    assert "stroke-dasharray" in tips(svg)["reference"]


def test_names_are_no_formulas_and_shortened() -> None:
    svg = bars([("cost $x$ of $y$", [Bar(1.0)]), ("long " * 20, [Bar(1.0)])], "names")
    assert "cost $x$ of $y$" in texts(svg)
    assert ("long " * 20)[:39] + "…" in texts(svg)


def test_letters_that_the_fonts_lack_are_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert "数学" in texts(bars([("数学", [Bar(1.0)])], "letters"))
    assert not recwarn.list


def test_curves_have_a_point_per_value_a_legend_and_rings() -> None:
    svg = drawn_curves()
    points = tips(svg)
    assert list(points) == [
        *("one", "one: 1 -&gt; 0.5", "one: 2 -&gt; 0.25"),
        *("two", "two: 1 -&gt; 0.4", "two: 2 -&gt; 0.2"),
    ]
    ringed = [name for name, shape in points.items() if "stroke: var(--ink)" in shape]
    assert ringed == ["one: 2 -&gt; 0.25"]
    assert {"one", "two"} <= texts(svg)
    parsed(curves([Curve("flat", [(3, 1.0)])], "one point only", "x", from_zero=False))


def test_a_tree_has_its_nodes_below_their_parents_and_their_shares() -> None:
    svg = drawn_tree()
    assert "[0, 1]: top-2 token of head 2, accepted in 4.0 % of the steps" in svg
    places, radii = {}, {}
    for node in parsed(svg).iter("g"):
        title = node.find("title")
        if title is None or title.text is None:
            continue
        (use,) = node.iter("use")
        path = title.text.partition(":")[0]
        places[path] = (float(use.get("x", "0")), float(use.get("y", "0")))
        shape = next(node.iter("path")).get("d", "")
        radii[path] = max(float(number) for number in re.findall(r"[\d.]+", shape))
    assert len(places) == 6
    assert places["[0]"][0] < places["[1]"][0]
    assert places["[0, 0]"][0] < places["[0]"][0] < places["[0, 1]"][0]
    assert places["[0, 0]"][1] > places["[0]"][1] > places["next token of the target model"][1]
    assert radii["[0]"] > radii["[1]"] > radii["[0, 1]"]
    assert {"head 1", "head 2", "target model"} <= texts(svg)
