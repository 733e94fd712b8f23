"""Files and models of a stand-in hub: fetched once, whole or not at all, and refused with a
sentence that helps.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from medusa_train.checkpoint.heads import save_draft, write_heads
from medusa_train.checkpoint.medusa_layouts import HeadTensors
from medusa_train.models.drafts import DRAFTS
from medusa_train.trees.tree import Tree
from tests.checkpoint.others import vllm_config, vllm_tensors, write
from tests.families import random_target_model
from tests.hub.server import StandInHub, serve

REPO, FILE = "somebody/chats", "chats.json"
CONTENT = b"0123456789" * 500_000
FETCH = f"""
from medusa_train.hub import FetchError, fetch_dataset_file
seen = []
try:
    path = fetch_dataset_file("{REPO}", "{FILE}", lambda *sizes: seen.append(sizes))
    print(path, path.stat().st_size, seen)
except FetchError as error:
    print(f"FetchError: {{error}}")
"""
LOAD = """
import sys
from medusa_train.errors import TargetModelError
from medusa_train.hub import FetchError, fetch_dataset_file
from medusa_train.models.loading import resolve_target_model
for name in sys.argv[1:]:
    for call, *arguments in ((resolve_target_model, name), (fetch_dataset_file, name, "chats.json")):
        try:
            call(*arguments)
        except (TargetModelError, FetchError) as error:
            print(error)
"""
#: Answers of the hub, and what they mean; {0} is the repository, {1} its page.
REFUSALS = {
    "gated": (
        401,
        "GatedRepo",
        "{0} is gated: accept its terms at {1}, then log in with `hf auth login` or set HF_",
    ),
    "pending": (
        403,
        "GatedRepo",
        "{0} is gated and your account has no access to it yet: accept its terms at {1}",
    ),
    "private": (
        401,
        "",
        "{0}, or it is private: check the name, or log in with `hf auth login` or set HF_TOKEN",
    ),
    "missing": (404, "RepoNotFound", "{0}, or it is private: check the name, or log in"),
    "forbidden": (403, "", "the hub does not let your account read {0}: see {1}"),
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    folder = tmp_path / "hub" / "datasets" / REPO
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(CONTENT)
    with serve(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def run(hub: StandInHub, tmp_path: Path) -> Callable[..., str]:
    """Run a program in a process of its own, since libraries read their settings once."""

    def start(program: str = FETCH, *arguments: str, **variables: str) -> str:
        environment = (
            os.environ | hub.environment | {"HF_HOME": str(tmp_path / "home"), **variables}
        )
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    return start


def fetched(home: Path) -> list[str]:
    """Return the names of files of repositories in the hub's cache, whole or not."""
    return sorted(path.name for path in home.glob("hub/*/*/*") if path.parent.name == "blobs")


def test_a_file_is_fetched_with_addresses_of_ipv6_in_no_proxy(run, tmp_path: Path) -> None:
    output = run(NO_PROXY="127.0.0.1,::1/128,[::1]", HTTP_PROXY="http://127.0.0.1:9")
    assert output.split()[1] == str(len(CONTENT))


def test_a_file_is_fetched_once_and_then_read_without_a_network(
    hub: StandInHub, run, tmp_path: Path
) -> None:
    first = run()
    assert first.split()[1:] == [str(len(CONTENT)), "[(0,", "0)]"]
    assert run(HF_HUB_OFFLINE="1").split() == [*first.split()[:2], "[]"]
    assert len(hub.ranges) == 1


@pytest.mark.slow
def test_a_broken_download_is_tried_again(hub: StandInHub, run) -> None:
    hub.breaks[FILE] = [2_000_000, 0, 1_000_000]
    path, size, *_ = run().split()
    assert size == str(len(CONTENT))
    assert Path(path).read_bytes() == CONTENT


@pytest.mark.slow
def test_a_download_that_breaks_off_is_an_error_and_leaves_nothing(
    hub: StandInHub, run, tmp_path: Path
) -> None:
    hub.breaks[FILE] = [2_000_000, *[0] * 5]
    assert "FetchError: the connection to http://127.0.0.1" in run()
    assert fetched(tmp_path / "home") == []
    assert run().split()[1] == str(len(CONTENT))


def test_a_data_set_of_the_hub_is_read_by_its_name(run, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "datasets" / "somebody" / "parquet" / "data"
    folder.mkdir(parents=True)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": turns}] * 3), folder / "train-0.parquet"
    )
    program = (
        "from medusa_train.data.sources import *; source ="
        " open_source(DatasetConfig(path='somebody/parquet'))\n"
    )
    assert run(program + "print([len(list(rows)) for _, rows in source.parts()])") == "[3]\n"


def test_a_refusal_says_what_to_do(hub: StandInHub, run) -> None:
    hub.refusals = {
        f"somebody/{name}": (status, code) for name, (status, code, _) in REFUSALS.items()
    }
    text = run(LOAD, *hub.refusals)
    for repo, (_, _, sentence) in zip(hub.refusals, REFUSALS.values(), strict=True):
        for page in (f"{hub.url}/{repo}", f"{hub.url}/datasets/{repo}"):
            assert sentence.format(repo, page) in text
    assert f"{hub.url}/datasets/{REPO} does not have this file" in run(
        FETCH.replace(FILE, "other.json")
    )


def test_without_a_network(run) -> None:
    text = run(LOAD, REPO, HF_HUB_OFFLINE="1")
    name = REPO.rpartition("/")[2]
    assert text.startswith(
        f"base_model {REPO}: there is no network (or HF_HUB_OFFLINE is set), and it is not in the"
        f" hub's cache: where there is one, run `hf download {REPO} --local-dir models/{name}`,"
        f" then set base_model=models/{name}\n"
    )
    assert text.endswith("\nno network, or HF_HUB_OFFLINE is set\n")


class _Proxy(BaseHTTPRequestHandler):
    """Answers every request with a page to sign in."""

    def do_GET(self) -> None:
        page = b"<html>sign in</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Print nothing."""


def test_a_page_of_a_proxy_is_no_file(run, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        output = run(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert output.startswith("FetchError: ")
    assert output.count("\n") == 1
    assert fetched(tmp_path / "home") == []


RESOLVE = """
import sys
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        paths = resolve_model(name, None, None)
        files = sorted(path.name for path in paths.heads.iterdir())
        print(paths.target_model, paths.home, files, paths.tree.name)
    except CheckpointError as error:
        print(error)
"""


FITTED = """
from medusa_train.checkpoint.resolve import resolve_model
paths = resolve_model("somebody/heads", None, None)
print(paths.tree, paths.arguments)
"""


def test_heads_of_the_hub_are_found_by_their_name(
    hub: StandInHub, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    target_model = random_target_model("llama", dtype=torch.float32)
    folder = tmp_path / "hub" / "models" / "somebody" / "heads"
    draft = DRAFTS["hydra"].from_target_model(target_model, num_heads=2, num_layers=1)
    save_draft(draft, folder, "somebody/model")
    (folder / "code.py").write_text("raise SystemExit")
    Tree.chain(2).save(folder / "tree.json")
    files = ["config.json", "draft.safetensors", "tree.json"]
    expected = f"somebody/model runs/hub/somebody--heads {files} tree.json\n"
    assert run(RESOLVE, "somebody/heads") == expected
    assert run(RESOLVE, "somebody/heads", HF_HUB_OFFLINE="1") == expected
    assert list((tmp_path / "runs").iterdir()) == []

    # a tree that was fitted here wins over the repository's
    home = tmp_path / "runs" / "hub" / "somebody--heads"
    home.mkdir(parents=True)
    Tree.chain(1).save(home / "tree.json")
    arguments = "['--model', 'somebody/heads', '--base-model', 'somebody/model']"
    assert run(FITTED) == f"runs/hub/somebody--heads/tree.json {arguments}\n"

    # the same heads as the public code's pickle, which is fetched only without safetensors
    draft = DRAFTS["medusa"].from_target_model(target_model, num_heads=2)
    heads = HeadTensors(2, 1, dict(draft.state_dict()), "somebody/model")
    folder = tmp_path / "hub" / "models" / "somebody" / "pickled"
    write_heads(heads, folder, pickled=True)
    Tree.chain(2).save(folder / "tree.json")
    expected = "somebody/model runs/hub/somebody--pickled {} tree.json\n"
    files = ["config.json", "medusa_lm_head.safetensors", "tree.json"]
    assert run(RESOLVE, "somebody/pickled") == expected.format(files)
    (folder / "medusa_lm_head.safetensors").unlink()
    files = ["config.json", "medusa_lm_head.pt", "tree.json"]
    other_home = {"HF_HOME": str(tmp_path / "other home")}
    assert run(RESOLVE, "somebody/pickled", **other_home) == expected.format(files)
    offline = {"HF_HUB_OFFLINE": "1", **other_home}
    assert run(RESOLVE, "somebody/pickled", **offline) == expected.format(files)

    # a draft of a kind that is not read: its weights are not fetched
    other = tmp_path / "hub" / "models" / "somebody" / "dflash"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["DFlash2DraftModel"]}))
    (other / "model.safetensors").write_bytes(b"gigabytes")
    assert "of the kind DFlash2DraftModel, which is not read" in run(RESOLVE, "somebody/dflash")
    assert not [*(tmp_path / "home").rglob("model.safetensors")]

    empty = tmp_path / "hub" / "models" / "somebody" / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    assert "holds no heads" in run(RESOLVE, "somebody/empty")
    assert "no repository of the hub" in run(RESOLVE, "somebody/nothing")
    said = run(RESOLVE, "somebody/other", HF_HUB_OFFLINE="1")
    assert "run `hf download somebody/other --local-dir models/other`, then name" in said
    assert "no such directory. Name a run" in run(RESOLVE, "runs/a/b")


def test_medusa_heads_of_the_hub_in_the_layout_of_vllm_are_found(run, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models" / "somebody" / "vllm"
    config = vllm_config(base_model_name_or_path="somebody/model")
    write(folder, vllm_tensors(), config, "model.safetensors")
    Tree.chain(2).save(folder / "tree.json")
    files = ["config.json", "model.safetensors", "tree.json"]
    assert f"--vllm {files} tree.json" in run(RESOLVE, "somebody/vllm")
