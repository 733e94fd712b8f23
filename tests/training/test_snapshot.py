"""Counters, random generators and the plan of a run."""

import json
import math
import random
import socket
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from medusa_train.checkpoint import store as store_module
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.training.deepspeed_strategy import DeepSpeedStrategy
from medusa_train.training.distributed import init_distributed
from medusa_train.training.process_info import ProcessInfo
from medusa_train.training.schedule import TrainingSchedule
from medusa_train.training.setup import seed_all
from medusa_train.training.snapshot import TrainState, load_snapshot, rng_state, set_rng_state
from medusa_train.training.step_metrics import Window
from tests.training.mishap import forks, start, wait


def test_round_trip_through_json_keeps_every_bit():
    state = TrainState(
        step=7, epoch=1 / 3, data={"epoch": 1, "place": [3, 4]}, best_loss=0.1 + 0.2, best_step=5
    )
    state.tokens, state.seconds, state.evaluated = 12345, 1.1, 6
    state.window = Window(sums=[1 / 7, 99.0, 1.0], steps=2, grad_norm=0.3, lr=1e-3)
    assert TrainState.from_json(json.loads(json.dumps(asdict(state)))) == state


def test_sums_of_an_earlier_version_are_dropped():
    window = {"loss": 1.5, "tokens": 99, "correct": [1], "counts": [2], "known": [2], "steps": 2}
    assert TrainState.from_json({"step": 7, "window": window}) == TrainState(step=7)


def test_best_and_patience():
    state = TrainState(step=1)
    assert not state.record_eval(math.nan)
    assert state.best == "none was finite"
    assert state.record_eval(2.0)
    state.step = 2
    assert not state.record_eval(2.0)
    state.step = 3
    assert not state.record_eval(math.nan)
    assert (state.best_loss, state.best_step, state.evals_since_best, state.evaluated) == (
        2.0,
        1,
        2,
        3,
    )
    assert state.record_eval(1.5)
    assert (state.best_step, state.evals_since_best) == (3, 0)


def draw() -> list[float]:
    return [
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_all_random_generators_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    draw()  # leaves Python's and numpy's spare Gaussian behind: state beyond the key
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"rng": rng_state()})
    wanted = draw()
    assert draw() != wanted
    set_rng_state(store.load(path)["rng"])
    assert draw() == wanted


def test_one_seed_decides_all_of_them() -> None:
    seed_all(2**32 + 5)
    first = draw()
    draw()
    seed_all(2**32 + 5)
    assert draw() == first
    seed_all(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def due(happens, total):
    return [step for step in range(1, total + 1) if happens(step)]


def test_by_steps():
    plan = TrainingSchedule(10, 5.0, logging_steps=4, eval_every=3, save_every=5)
    assert due(plan.logs, 10) == [4, 8, 10]
    assert due(plan.evaluates, 10) == [3, 6, 9, 10]
    assert due(plan.saves, 10) == [5, 10]
    assert due(TrainingSchedule(10, 5.0).saves, 10) == [10]


def test_by_epochs_of_broken_length():
    plan = TrainingSchedule(10, 2.5, eval_every=2.5, save_every=1.25)
    assert due(plan.evaluates, 10) == [3, 5, 8, 10]
    assert due(plan.saves, 10) == [2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize(("micro", "accumulation"), [(9, 7), (7, 3), (7, 6)])
def test_an_epoch_that_ends_with_a_step_is_not_missed_by_rounding(micro, accumulation):
    plan = TrainingSchedule(1000, micro / accumulation, eval_every=micro / accumulation)
    ends = [
        step
        for step in range(1, 100)
        if step * accumulation // micro > (step - 1) * accumulation // micro
    ]
    assert due(plan.evaluates, 99) == ends


def load_in_process(info: ProcessInfo, run: Path) -> None:
    """Load the checkpoint of `run` as one of several processes; write which files it read whole."""
    distributed = init_distributed(info)
    store = CheckpointStore(run)
    checksum, verified = store_module.checksum, []

    def recorded(path: Path) -> int:
        verified.append(path.name)
        return checksum(path)

    with patch.object(store_module, "checksum", recorded):
        snapshot = load_snapshot(store, run / "checkpoints" / "step-1", distributed)
    assert snapshot["engine"]["m"].sum() == 8
    (run / f"verified-{info.rank}.json").write_text(json.dumps(sorted(verified)))
    distributed.destroy()


@forks
def test_one_process_of_two_reads_the_whole_checkpoint(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(
        1, {"engine": {"m": torch.ones(8)}, "draft": {"w": torch.ones(4)}}
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    started = [
        start(
            tmp_path / f"log-{rank}",
            load_in_process,
            ProcessInfo(rank, 2, rank, "127.0.0.1", port),
            tmp_path,
        )
        for rank in (0, 1)
    ]
    codes = [wait(process) for process in started]
    assert codes == [0, 0], (tmp_path / "log-0").read_text() + (tmp_path / "log-1").read_text()
    read = [json.loads((tmp_path / f"verified-{rank}.json").read_text()) for rank in (0, 1)]
    assert read == [["draft.safetensors", "engine.safetensors", "state.json"], ["state.json"]]


@pytest.mark.parametrize("numel", [12, 11, 7, 5])
def test_every_process_takes_its_part_of_an_optimizer_state_under_zero_3(numel: int) -> None:
    """The last part is padded with zeros, however short the state is."""
    set_to: list[torch.Tensor] = []
    setter = SimpleNamespace(
        safe_set_local_optimizer_state=lambda p, value, key: set_to.append(value)
    )
    part = torch.zeros(4)
    parameter = SimpleNamespace(
        shape=(0,),
        ds_shape=torch.Size([numel]),
        ds_tensor=part,
        ds_status=SimpleNamespace(name="NOT_AVAILABLE"),
    )
    value = torch.arange(1.0, numel + 1)
    for rank in range(3):
        fake = SimpleNamespace(
            _stage=3,
            _distributed=SimpleNamespace(rank=rank, size=3),
            _deepspeed=SimpleNamespace(utils=setter),
        )
        DeepSpeedStrategy._set_optimizer_state(fake, parameter, "exp_avg", value)  # type: ignore[arg-type]
    whole = torch.cat(set_to)
    assert whole.tolist() == [*value.tolist(), *[0.0] * (12 - numel)]
