"""The explanation of a server's end from its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from medusa_train.server_bench.serve import TAIL_LINES, VLLMServer

LEAKS = """nanobind: leaked 12 instances!
 - leaked instance 0x7f10c0a0 of type "xgrammar.xgrammar_bindings.CompiledGrammar"
nanobind: leaked 3 keep_alive records!
nanobind: leaked 8 types!
 - leaked type "xgrammar.xgrammar_bindings.GrammarCompiler"
 - ... skipped remainder
nanobind: leaked 40 functions!
 - leaked function "compile_json_schema"
 - leaked function ""
 - ... skipped remainder

nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def ended(tmp_path: Path, output: str) -> VLLMServer:
    """A server that printed `output` and failed."""
    code = "import sys; sys.stdout.write(sys.argv[1]); sys.exit(3)"
    server = VLLMServer("plain", [sys.executable, "-c", code, output], 1, tmp_path / "vllm.log", has_heads=False)
    server.start()
    assert server.has_ended(60)
    return server


@pytest.mark.parametrize("prefix", ["", "(EngineCore_0 pid=42) "])
def test_the_cause_is_quoted_and_not_the_leaked_objects_after_it(tmp_path: Path, prefix: str) -> None:
    leaks = "".join(f"{prefix}{line}\n" for line in LEAKS.splitlines() if line)
    cause = ["INFO engine is up", " - leaked memory is none of nanobind's", "ValueError: leaked token: nanobind: 3"]
    message = ended(tmp_path, "\n".join([*cause, leaks])).explain()
    assert "ended with exit code 3 while starting" in message
    assert [line.strip() for line in message.partition("vllm.log:\n")[2].splitlines()] == [
        line.strip() for line in cause
    ]


def test_the_tail_is_of_the_last_lines_that_say_something(tmp_path: Path) -> None:
    lines = [f"line {i}" for i in range(30)]
    message = ended(tmp_path, "\n\n".join(lines) + "\n" + LEAKS).explain()
    assert message.splitlines()[-TAIL_LINES:] == [f"  {line}" for line in lines[-TAIL_LINES:]]
    assert "(empty)" in ended(tmp_path, LEAKS).explain()
