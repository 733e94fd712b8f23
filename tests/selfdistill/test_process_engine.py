"""Answers of several processes: real ones, and fake ones whose messages the test writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.conversation import Message
from medusa_train.errors import BackboneError
from medusa_train.selfdistill import process_engine
from medusa_train.selfdistill.engines import Answer, Engine, Request
from medusa_train.selfdistill.hf_engine import Counts
from medusa_train.selfdistill.local_model import LocalModel
from medusa_train.selfdistill.process_engine import ProcessEngine
from medusa_train.selfdistill.process_worker import CompileDecision, Failed, Finished, Loaded, Ready, Start
from medusa_train.worker_processes import Worker
from tests.evaluation.tiny_model import write_backbone, write_run

QUESTIONS = [f"{'why ' * (n % 5)}question {n}" for n in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("processes") / "backbone")


def local_model(directory: Path, temperature: float = 0.0, **keys: Any) -> LocalModel:
    options = {"temperature": temperature, "max_new_tokens": 24}
    return LocalModel(resolve_model(None, str(directory), None), "float64", options, **keys)


def request(number: int) -> Request:
    return Request((Message("user", QUESTIONS[number]),), seed=100 + number)


def all_answers(engine: Engine) -> list[Answer]:
    for number in range(len(QUESTIONS)):
        engine.submit(number, request(number))
    answers = dict(engine.next() for _ in QUESTIONS)
    return [answers[number] for number in range(len(QUESTIONS))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_processes_give_the_answers_of_one(directory: Path, temperature: float) -> None:
    model = local_model(directory, temperature, compiled="auto", tokens=100)
    alone = all_answers(model.open(1, lambda line: None))
    assert len({answer.text for answer in alone}) > 5
    lines: list[str] = []
    engine = ProcessEngine(model, 4, 2, adjustable=False, note=lines.append)
    try:
        assert engine.capacity == 16
        assert engine.wait_until_ready() == 2
        assert all_answers(engine) == alone
        assert all(process.counts.steps for process in engine._processes)
        for process in engine._processes:
            pid = process.worker.process.pid
            assert pid is not None
            assert os.getpgid(pid) == pid != os.getpgid(0)  # Ctrl-C of a terminal does not reach it
            if process.share.cpus is not None:
                assert os.sched_getaffinity(pid) == process.share.cpus
        os.kill(pid, signal.SIGKILL)
        for number in range(len(QUESTIONS)):
            engine.submit(number, request(number))
        with pytest.raises(BackboneError, match=r"one of 2 generation processes ended by SIGKILL.*Set processes to"):
            [engine.next() for _ in QUESTIONS]
    finally:
        engine.close()
    assert not multiprocessing.active_children()
    assert [line.split(",")[0] for line in sorted(lines)] == ["compile: no", "processes: 2"]


@pytest.mark.slow
def test_heads_draft_in_every_process(directory: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", directory)
    paths = resolve_model(str(tmp_path / "run"), None, None)
    model = LocalModel(paths, "float64", {"temperature": 0.0, "max_new_tokens": 24})
    plain = all_answers(local_model(directory).open(1, lambda line: None))
    engine = ProcessEngine(model, 4, 2, adjustable=False, note=lambda line: None)
    try:
        engine.wait_until_ready()
        assert all_answers(engine) == plain
        assert float(engine.stats()["tokens per step"]) >= 1.0
    finally:
        engine.close()


@pytest.mark.slow
def test_every_process_compiles(directory: Path) -> None:
    model = local_model(directory)
    alone = all_answers(model.open(1, lambda line: None))
    compiled = local_model(directory, compiled=True)
    engine = ProcessEngine(compiled, 4, 2, adjustable=False, note=lambda line: None)
    try:
        engine.wait_until_ready()
        assert all_answers(engine) == alone
    finally:
        engine.close()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_the_error_of_one_process(directory: Path) -> None:
    model = local_model(directory)
    model = replace(model, paths=replace(model.paths, base_model="./absent"))
    with pytest.raises(BackboneError) as alone:
        model.open(1, lambda line: None)
    with pytest.raises(BackboneError) as together:
        ProcessEngine(model, 4, 2, adjustable=False, note=lambda line: None)
    assert str(together.value) == str(alone.value)
    assert not multiprocessing.active_children()


# Fake processes

Others = list[Connection]
StartEngine = Callable[..., tuple[ProcessEngine, Others, list[str]]]


@pytest.fixture
def fake_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    """Start an engine whose processes are pipes: each has sent `messages`, the test reads and writes the rest."""

    def start(
        batch_size: int, processes: int, *messages: object, run: Path | None = None, **keys: Any
    ) -> tuple[ProcessEngine, Others, list]:
        others: Others = []
        lines: list[str] = []

        def start_worker(target: object, *args: object) -> Worker:
            connection, other = Pipe()
            others.append(other)
            for message in messages:
                other.send(message)
            process = SimpleNamespace(pid=None, exitcode=3, kill=lambda: None, join=lambda timeout=None: None)
            return Worker(process, connection)  # type: ignore[arg-type]

        monkeypatch.setattr(process_engine, "start_worker", start_worker)
        adjustable = keys.pop("adjustable", False)
        model = local_model(directory, **keys)
        if run is not None:
            model = replace(model, paths=resolve_model(str(run), None, None))
        return ProcessEngine(model, batch_size, processes, adjustable=adjustable, note=lines.append), others, lines

    return start


def received(other: Connection) -> list[Any]:
    messages = []
    while other.poll(0.01):
        messages.append(other.recv())
    return messages


def ids(other: Connection) -> list[int]:
    return [number for requests in received(other) for number, _ in requests]


ANSWER = Answer("text", "stop", 10, 4)


def test_requests_are_spread_and_go_to_the_process_with_the_fewest(fake_engine: StartEngine) -> None:
    engine, others, _ = fake_engine(8, 2, Loaded(1, None), Ready())
    engine.wait_until_ready()
    starts = [received(other) for other in others]
    assert [[type(message) for message in messages] for messages in starts] == [[Start], [Start]]
    assert [messages[0].share.rows for messages in starts] == [4, 4]
    for number in range(6):
        engine.submit(number, request(number))
    engine._hand_out()
    assert sorted(len(ids(other)) for other in others) == [3, 3]
    for number in range(6, 12):
        engine.submit(number, request(number))
    engine._hand_out()
    assert [len(process.lengths) for process in engine._processes] == [5, 5]  # its four rows, and one to follow
    assert len(engine._waiting) == 2
    for other in others:
        received(other)
    answered = list(engine._processes[1].lengths)[:2]
    others[1].send(Finished([(number, ANSWER) for number in answered], Counts(steps=7, again=2)))
    assert engine.next() == (answered[0], ANSWER)
    assert engine.next() == (answered[1], ANSWER)
    engine._hand_out()
    assert (len(ids(others[0])), len(ids(others[1]))) == (0, 2)
    others[0].send(Finished([], Counts(steps=1, again=1)))
    engine._receive()
    assert engine.stats() == {"batched answers generated again in single rows (rounding)": "3"}
    others[0].close()
    with pytest.raises(BackboneError, match="ended with exit code 3"):
        engine.next()


def test_whole_batches_are_handed_out_while_heads_are_compared(
    fake_engine: StartEngine, directory: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", directory)
    engine, others, _ = fake_engine(4, 1, Loaded(1, None), Ready(), run=tmp_path / "run")
    engine.wait_until_ready()
    received(others[0])

    def answer(numbers: list[int], compared: int) -> None:
        others[0].send(Finished([(number, ANSWER) for number in numbers], Counts(compared=compared)))
        engine._receive()
        engine._hand_out()

    for number in range(12):
        engine.submit(number, request(number))
    engine._hand_out()
    first = ids(others[0])
    assert len(first) == 8  # a batch, and the next one
    answer(first[:4], 4)
    second = ids(others[0])
    assert len(second) == 4
    for number in range(12, 24):
        engine.submit(number, request(number % 12))
    answer(first[4:], 8)
    assert len(engine._processes[0].lengths) == 5  # its four rows, and one to follow
    assert len(ids(others[0])) == 1


def test_a_large_model_runs_in_one_process(fake_engine: StartEngine) -> None:
    engine, others, lines = fake_engine(8, 2, Loaded(2**31, 10), Ready(), adjustable=True)
    assert engine.wait_until_ready() == len(others) == 1
    assert received(others[0])[0].share.rows == 8
    assert lines == ["processes: 1, since weights of 2.1 GB are better read once for all conversations"]


def test_little_memory_means_fewer_processes(fake_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "free_memory", lambda device: 4 * 10**9)
    engine, others, lines = fake_engine(12, 3, Loaded(10**9, 2 * 10**9), Ready(), adjustable=True)
    assert engine.wait_until_ready() == len(others) == 2
    assert lines[0] == "processes: 2 of 3, since each takes 2.0 GB, and 4.0 GB are free"
    wished, others, _ = fake_engine(12, 3, Loaded(10**9, 2 * 10**9), Ready())  # a number that the user chose
    assert wished.wait_until_ready() == 3


def test_the_first_process_decides_for_all_whether_to_compile(fake_engine: StartEngine) -> None:
    decision = CompileDecision(True, "compile: yes, it pays")
    engine, others, lines = fake_engine(8, 2, Loaded(1, None), decision, Ready(), compiled="auto", tokens=100)
    engine.wait_until_ready()
    first, second = (received(other)[0] for other in others)
    assert (first.compiled, first.tokens, second.compiled) == (None, 50, True)
    assert lines.count("compile: yes, it pays") == 1


def test_what_fails_in_a_process_is_raised_here(fake_engine: StartEngine) -> None:
    with pytest.raises(BackboneError, match="no such model"):
        fake_engine(8, 2, Failed(BackboneError("no such model"), ""))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fake_engine(8, 2, Failed(None, "ZeroDivisionError: division by zero"))
