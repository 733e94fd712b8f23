import xml.etree.ElementTree as ET

import pytest

from medusa_train.pages.charts import Bar, Curve, bars, curves, ticks, tree_drawing


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 2.3, [0, 0.5, 1, 1.5, 2]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.7, 3.1, [2, 2.5, 3]),
        (0.0, 63.0, [0, 20, 40, 60]),
        (4.0, 4.0, [4.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def widths(svg: str) -> list[float]:
    return [float(node.get("width", "0")) for node in parsed(svg).iter("rect")]


def test_bars_are_as_long_as_their_values_and_carry_whiskers() -> None:
    svg = bars(
        [("a<b", [Bar(1.0, (0.8, 1.3))]), ("c", [Bar(2.0)]), ("d", [Bar(None)])],
        "speed",
        unit="x",
        reference=1,
    )
    one, two = widths(svg)
    assert two == pytest.approx(2 * one, rel=0.01)
    assert {"a<b", "c", "1.00x", "2.00x", "not measured"} <= {
        node.text for node in parsed(svg).iter("text")
    }
    assert sum(node.get("class") == "whisker" for node in parsed(svg).iter("line")) == 3
    assert sum(node.get("class") == "reference" for node in parsed(svg).iter("line")) == 1
    assert "95 % interval 0.80-1.30" in svg


def test_curves_have_a_point_per_value_a_legend_and_rings() -> None:
    drawn = [Curve("one", [(1, 0.5), (2, 0.25)], marked=[2]), Curve("two", [(1, 0.4), (2, 0.2)])]
    root = parsed(curves(drawn, "label", "x"))
    assert len(list(root.iter("circle"))) == 4
    assert sum("ringed" in (node.get("class") or "") for node in root.iter("circle")) == 1
    assert {"one", "two"} <= {node.text for node in root.iter("text")}
    assert len(list(root.iter("polyline"))) == 2
    parsed(curves([Curve("flat", [(3, 1.0)])], "one point only", "x", from_zero=False))


def test_a_tree_has_its_nodes_below_their_parents_and_their_shares() -> None:
    svg = tree_drawing([(0,), (1,), (0, 0), (0, 1), (1, 0)], [0.5, 0.2, 0.25, 0.04, 0.004])
    root = parsed(svg)
    circles = list(root.iter("circle"))
    assert len(circles) == 6
    assert "[0, 1]: top-2 token of head 2, accepted in 4.0 % of the steps" in svg
    zero, one, zero_zero, zero_one = [
        (float(node.get("cx", "0")), float(node.get("cy", "0"))) for node in circles
    ][1:5]
    assert zero[0] < one[0]
    assert zero_zero[0] < zero[0] < zero_one[0]
    assert zero_zero[1] > zero[1]
    radii = [float(node.get("r", "0")) for node in circles[1:]]
    assert radii[0] > radii[1] > radii[3]
    assert {"head 1", "head 2", "backbone"} <= {node.text for node in root.iter("text")}
