from medusa_train.evaluation.tree_choice import CalibrationResult, NamedCandidate, interpolate
from medusa_train.trees.tree import Tree


def test_latencies_are_interpolated_between_measured_sizes() -> None:
    measured = {0: 3.0, 4: 5.0, 8: 6.0}
    assert [interpolate(measured, nodes) for nodes in (0, 1, 4, 6, 8, 20)] == [3.0, 3.5, 5.0, 5.5, 6.0, 6.0]
    assert interpolate({4: 5.0}, 0) == 5.0


def small_result() -> CalibrationResult:
    sizes = range(3)
    trees = {name: {n: Tree.from_paths([(i,) for i in range(n)]) for n in sizes} for name in ("joint", "independent")}
    trees["chain"] = {n: Tree.chain(min(n, 1)) for n in sizes}
    curves = {name: {n: 1 + n / 2 for n in sizes} for name in trees}
    side = [NamedCandidate(trees[name][1], 1.5, 4.0, name) for name in trees]
    about = {"conversations": 4, "answers": 5, "tokens": 600}
    return CalibrationResult(trees, curves, {0: 2.0, 2: 4.0}, 2, side, [[0.5, 0.75]], [0.5, 0.25], about)


def test_content_of_tree_json_and_calibration_json() -> None:
    record = small_result().tree_record()
    assert set(record) == {"nodes", "tokens_per_step", "step_ms", "head_accuracy", "calibration", "sizes"}
    assert record["sizes"][1] == {"nodes": 1, "tokens_per_step": 1.5, "step_ms": 3.0, "tokens_per_s": 500.0}
    everything = small_result().as_json()
    assert [size["nodes"] for size in everything["searches"]["chain"]] == [0, 1]
    assert everything["medusa_choices"] == [[0], [1]]
    assert everything["candidates"][0]["tokens_per_s"] == 375.0
