"""The plan for a GPU: limits, checks that find mistakes, resuming, steps that fail, and the page."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu
import pytest
from gpu_plan import (
    ALL_SECONDS,
    PART_SECONDS,
    ROOT,
    SMOLLM2,
    SMOLLM2_BENCH,
    Step,
    plan,
    problems_of,
    short_plan,
    wheels,
)


def step(name: str, code: str, **more: object) -> Step:
    """A step that runs a line of Python."""
    words = ("timeit", "-n", "1", "-r", "1", code)
    return Step(name, **{"part": 1, "words": words, "expected": 1, "limit": 60, **more})


def arguments(out: Path, *more: str) -> object:
    return gpu.parse_arguments(["--out", str(out), "--work", str(out / "work"), *more])


def test_parts_take_eight_minutes_and_all_of_them_31() -> None:
    parts: dict[int, int] = {}
    for one in plan():
        assert one.expected < one.limit
        parts[one.part] = parts.get(one.part, 0) + one.limit
    assert sorted(parts) == [1, 2, 3, 4, 5]
    assert max(parts.values()) <= PART_SECONDS
    assert sum(parts.values()) <= ALL_SECONDS


@pytest.mark.parametrize("minutes", gpu.MINUTES)
def test_short_plans_fit_their_minutes_and_begin_with_a_profile(minutes: int) -> None:
    steps = short_plan(minutes)
    assert sum(one.limit for one in steps) <= 60 * minutes
    assert all(one.expected < one.limit for one in steps)
    assert [one.name for one in steps][:3] == ["profile", "steps-7b", "loops-8b"]
    assert len({one.name for one in steps}) == len(steps)


@pytest.mark.parametrize("minutes", gpu.MINUTES)
def test_a_dry_run_of_a_short_plan_finds_no_problem(
    minutes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--minutes", str(minutes), "--dry-run", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "every step can run" in printed
    assert all(f"  {one.name}: about" in printed for one in short_plan(minutes))


def test_a_dry_run_of_a_part_counts_no_problem_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [step("first", "pass"), step("second", "pass", part=2)]
    problems = {"first": ["a file is missing"], "second": []}
    monkeypatch.setattr(gpu, "problems_of", lambda one, _: problems[one.name])
    monkeypatch.setattr(gpu, "print_wheels", lambda: 0)
    assert gpu.dry_run(steps, arguments(tmp_path, "--part", "2"))
    assert not gpu.dry_run(steps, arguments(tmp_path, "--part", "1"))
    assert "PROBLEM: a file is missing" in capsys.readouterr().out


def test_no_step_begins_after_the_minutes_and_none_outlasts_them(tmp_path: Path) -> None:
    steps = [step("late", "pass", expected=60, limit=90)]
    record = gpu.run_step(steps[0], tmp_path / "log", 20.0)
    assert (record["status"], record["reason"]) == ("skipped", "20 s were left")
    record = gpu.run_step(step("long", "__import__('time').sleep(60)"), tmp_path / "log", 2.0)
    assert (record["status"], record["reason"]) == ("stopped at its limit", "after 2 s")


def test_every_step_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    out = tmp_path / "gpu.json"
    steps = [
        step("first", "pass"),
        step("second", f"open({str(seen)!r}, 'w').write(open({str(out)!r}).read())"),
    ]
    assert gpu.run(steps, arguments(tmp_path, "--minutes", "8"), [])
    assert list(json.loads(seen.read_text())["steps"]) == ["first"]


@pytest.mark.parametrize("one", plan(), ids=[one.name for one in plan()])
def test_every_step_can_run_but_for_the_model_that_is_fetched(one: Step) -> None:
    expected = [] if (ROOT / SMOLLM2).exists() or SMOLLM2 not in one.needs else [SMOLLM2]
    problems = problems_of(one, plan())
    assert [problem.split()[0] for problem in problems] == expected
    assert all("make smollm2-model" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "word", "wrong", "said"),
    [
        ("decode-7b", "--contexts", "--context-length", "decode.py does not accept"),
        ("smollm2_m1-train", "configs/smollm2_m1.yaml", "configs/tiny_m0.yaml", "tiny_m0.yaml"),
        ("smollm2_m1-train", "overwrite_output_dir=true", "overwrite=true", "overwrite"),
        ("smollm2_m1-eval", SMOLLM2_BENCH, "tinny", "tinny"),
        ("tests", "tests/gpu", "tests/gqu", "tests/gqu"),
    ],
)
def test_a_mistake_in_a_step_is_found(name: str, word: str, wrong: str, said: str) -> None:
    (one,) = [one for one in plan() if one.name == name]
    changed = replace(one, words=tuple(wrong if each == word else each for each in one.words))
    assert changed != one
    problems = problems_of(changed, plan())
    assert problems
    assert said in " ".join(problems)


def test_wheels_are_pinned_and_not_in_the_image() -> None:
    needed = wheels()
    assert {"bitsandbytes", "deepspeed", "peft", "accelerate", "pytest"} <= set(needed)
    assert {"matplotlib", "openai"} <= set(needed)
    assert not {"torch", "transformers", "numpy", "tokenizers"} & set(needed)
    assert [name for name, pin in needed.items() if pin is None or ";" in pin] == []


def test_finished_steps_are_kept_and_others_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count, flag = tmp_path / "count", tmp_path / "flag"
    steps = [
        step("counts", f"open({str(count)!r}, 'a').write('x')"),
        step("fails first", f"assert __import__('os').path.exists({str(flag)!r})"),
        step("part two", "pass", part=2),
    ]
    args = arguments(tmp_path, "--part", "1")
    assert not gpu.run(steps, args, [])
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["status"] for name, one in record["steps"].items()} == {
        "counts": "done",
        "fails first": "failed",
    }
    assert "AssertionError" in " ".join(record["steps"]["fails first"]["output"])
    flag.touch()
    capsys.readouterr()
    assert gpu.run(steps, args, [])
    assert "1 steps to run" in capsys.readouterr().out
    assert count.read_text() == "x"
    assert gpu.run(steps, arguments(tmp_path), [])
    assert "3 of 3 steps are done" in capsys.readouterr().out
    assert "| part two | 2 | done |" in (tmp_path / "gpu.md").read_text()
    changed = [replace(steps[0], words=(*steps[0].words, "pass")), *steps[1:]]
    assert gpu.pending(changed, None, gpu.load_record(tmp_path)) == changed[:1]


def test_a_step_and_its_children_end_at_the_limit(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"p = __import__('subprocess').Popen(['sleep', '60']); open({str(pid)!r},"
        " 'w').write(str(p.pid)); p.wait()"
    )
    record = gpu.run_step(step("sleeps", code, limit=4), tmp_path / "log")
    assert record["status"] == "stopped at its limit"
    assert record["seconds"] < 40
    state = Path(f"/proc/{pid.read_text()}/stat")
    end = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.1)  # a busy machine takes a moment to end a killed process
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_goals_and_pages_come_from_what_was_measured(tmp_path: Path) -> None:
    milliseconds = {"plain": [4.0, 3.5], "tree 63": [4.4, 3.6], "heads": [1.0, 0.9]}
    rows = [
        {"shape": "7B", "steps": "CUDA graphs", "ms_and_floor": milliseconds},
        {"shape": "7B", "obstacle": "no"},
    ]
    page = (
        "# Title\n\nA GPU, Python 3.12.\n\nA note.\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n- a"
        " line after\n"
    )
    (tmp_path / "decode.md").write_text(page)
    (tmp_path / "decode.json").write_text(json.dumps({"machine": {}, "rows": rows}))
    decode = step(
        "decode", "pass", page=str(tmp_path / "decode.md"), figures=str(tmp_path / "decode.json")
    )
    found = gpu.results_of(decode)
    assert found["figures"] == {"rows": rows}
    assert found["page"] == ["A note.", "", "| a | b |", "| --- | ---: |", "| 1 | 2 |"]
    cases = [
        {"what": "shape1", "method": "ours", "mfu": 0.5},
        {"what": "shape1", "method": "naive", "mfu": 0.2},
    ]
    goals = gpu.goals(
        {"decode": {"status": "done", **found}, "train": {"figures": {"cases": cases}}}
    )
    assert (goals[-1]["measured"], goals[-1]["met"]) == (0.5, True)
    # a tree's step over a plain one
    assert any((one["measured"], one["met"]) == (1.1, False) for one in goals)
    assert gpu.goals({}) == []


@pytest.mark.parametrize("option", ["--out", "--work"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_a_directory_that_cannot_be_written_stops_before_the_first_step(
    option: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(gpu, "short_plan", lambda minutes, work: [])
    monkeypatch.setattr(gpu, "print_wheels", lambda: 0)
    given = ["--minutes", "8", *more, "--out", str(tmp_path), "--work", str(tmp_path)]
    assert gpu.main(given) == 0
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert gpu.main([*given, option, str(path)]) == 2
        said = capsys.readouterr().err
        assert f"error: {option}: {tmp_path / 'file'} cannot be written" in said
        assert "choose another directory" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"steps": ', "is not JSON"),
        ("[1]", "has no record of steps"),
        ('{"steps": [1]}', "has no record of steps"),
    ],
)
def test_a_damaged_record_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu.json").write_text(text)
    given = ["--minutes", "8", "--out", str(tmp_path), "--work", str(tmp_path)]
    for more in ([], ["--dry-run"]):
        assert gpu.main([*given, *more]) == 1
        message = capsys.readouterr().err
        assert f"gpu.json {said}" in message
        assert "move it away" in message


def has_ended(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_and_the_same_command_continues(
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM alone would leave the step behind, beside which the next run measures."""
    count, pid, flag = tmp_path / "count", tmp_path / "pid", tmp_path / "flag"
    waits = (
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()));"
        f" time.sleep(0 if os.path.exists({str(flag)!r}) else 60)"
    )
    steps = [step("counts", f"open({str(count)!r}, 'a').write('x')"), step("waits", waits)]
    monkeypatch.setattr(gpu, "short_plan", lambda minutes, work: steps)
    given = ["--minutes", "8", "--out", str(tmp_path), "--work", str(tmp_path / "work")]

    def send_once_it_waits() -> None:
        end = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send_once_it_waits)
    sender.start()
    assert gpu.main(given) == code
    sender.join()
    assert has_ended(int(pid.read_text()))
    assert "the same command continues" in capsys.readouterr().err
    flag.touch()
    assert gpu.main(given) == 0
    assert "1 steps to run" in capsys.readouterr().out
    assert count.read_text() == "x"


def test_a_second_interrupt_ends_the_step_at_once() -> None:
    """Also one that ignores Ctrl-C."""
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True, preexec_fn=ignore)
    wait = process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(10)

    process.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        gpu.end_group(process)
    assert has_ended(process.pid)


def test_a_result_of_other_arguments_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    """The plans of 8 and 15 minutes and the whole one share names of steps."""
    args = arguments(tmp_path)
    small = step("variants", "pass")
    assert gpu.run([small], args, [])
    large = [step("variants", "raise ValueError")]
    assert not gpu.run(large, args, [])
    record = gpu.load_record(tmp_path)
    kept = record["steps"]["variants"]
    assert (kept["status"], kept["words"]) == ("done", list(small.words))
    assert kept["reason"] == "run again: failed, exit code 1"
    assert gpu.pending(large, None, record) == large
    page = (tmp_path / "gpu.md").read_text()
    assert "0 of 1 steps are done" in page
    assert "run again: failed, exit code 1 (other arguments) |" in page
    new = [step("variants", "pass; pass")]
    assert gpu.run(new, args, [])
    assert "(other arguments)" not in (tmp_path / "gpu.md").read_text()
