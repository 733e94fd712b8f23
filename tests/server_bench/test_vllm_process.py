"""The explanation of a server's end from its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from medusa_train.server_bench.serve import TAIL_LINES, VLLMServer

LEAKS = """nanobind: leaked 12 instances!
 - leaked instance 0x7f10c0a0 of type "xgrammar.xgrammar_bindings.CompiledGrammar"
nanobind: leaked 3 keep_alive records!
 - leaked type "xgrammar.xgrammar_bindings.GrammarCompiler"
 - leaked function ""
 - ... skipped remainder

nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def explained(tmp_path: Path, output: str) -> str:
    """The explanation of a server that printed `output` and failed."""
    code = "import sys; sys.stdout.write(sys.argv[1]); sys.exit(3)"
    server = VLLMServer("plain", [sys.executable, "-c", code, output], 1, tmp_path / "vllm.log", has_heads=False)
    server.start()
    assert server.has_ended(60)
    return server.explain()


@pytest.mark.parametrize("prefix", ["", "(EngineCore_0 pid=42) "])
def test_the_tail_is_of_the_last_lines_that_tell_the_cause(tmp_path: Path, prefix: str) -> None:
    lines = [*(f"line {i}" for i in range(30)), "ValueError: leaked token: nanobind: 3"]
    leaks = "".join(f"{prefix}{line}\n" for line in LEAKS.splitlines() if line)
    message = explained(tmp_path, "\n\n".join([*lines, leaks]))
    assert "ended with exit code 3 while starting" in message
    assert message.splitlines()[-TAIL_LINES:] == [f"  {line}" for line in lines[-TAIL_LINES:]]
    assert "(empty)" in explained(tmp_path, leaks)
