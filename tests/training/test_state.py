import json

import pytest

from medusa_train.training.state import TrainState, Window


def test_round_trip_through_json_keeps_every_bit():
    state = TrainState(step=7, epoch=1 / 3, data={"epoch": 1, "place": [3, 4]}, best_loss=0.1 + 0.2, best_step=5)
    state.tokens, state.seconds, state.evaluated = 12345, 1.1, 6
    state.window = Window(2, 1 / 7, 0.3, 1e-3, 99, 0.25, [1, 2], [3, 4])
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_best_and_patience():
    state = TrainState(step=1)
    assert state.note_eval(2.0)
    state.step = 2
    assert not state.note_eval(2.0)
    state.step = 3
    assert not state.note_eval(2.5)
    assert (state.best_loss, state.best_step, state.evals_since_best, state.evaluated) == (2.0, 1, 2, 3)
    assert state.note_eval(1.5)
    assert (state.best_step, state.evals_since_best) == (3, 0)


def test_window_adds_per_head():
    window = Window()
    window.add_heads([1, 0], [4, 0], [4, 0])
    window.add_heads([2, 0], [2, 0], [2, 0])
    assert window.top1() == [pytest.approx(0.5), 0.0]
    assert window.outside() == {}
    window.add_heads([0, 0], [3, 1], [1, 0])
    assert window.outside() == {"outside_vocabulary": pytest.approx(0.3)}
