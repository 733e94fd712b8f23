import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from medusa_train.checkpoint.load import compile_cache_dir, load_tree, load_with_draft, newest_run, resolve_model
from medusa_train.errors import CheckpointError
from medusa_train.trees.tree import Tree


def fake_run(directory: Path, written: float = 0.0, tree: bool = True, **config: object) -> Path:
    (directory / "heads").mkdir(parents=True)
    heads = directory / "heads" / "medusa_lm_head.safetensors"
    heads.write_bytes(b"")
    os.utime(heads, (written, written))
    (directory / "config.yaml").write_text(yaml.safe_dump({"base_model": "some/model", **config}))
    if tree:
        Tree.chain(2).save(directory / "tree.json")
    return directory


def test_the_newest_run_is_the_one_whose_heads_were_written_last(tmp_path: Path) -> None:
    fake_run(tmp_path / "b", written=100)
    newest = fake_run(tmp_path / "a", written=300)
    fake_run(tmp_path / "c", written=200)
    (tmp_path / "unfinished" / "heads").mkdir(parents=True)
    assert newest_run(tmp_path) == newest


def test_without_any_run_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="make demo"):
        newest_run(tmp_path / "runs")


def test_no_model_takes_the_newest_run_below_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(tmp_path / "runs" / "only")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(None, None, None).home.resolve() == (tmp_path / "runs" / "only").resolve()


def test_a_run_gives_backbone_heads_tree_and_template(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", chat_template="chatml")
    paths = resolve_model(str(run), None, None)
    assert (paths.base_model, paths.heads, paths.tree) == ("some/model", run / "heads", run / "tree.json")
    assert (paths.home, paths.chat_template) == (run, "chatml")
    assert resolve_model(str(run), "other/model", None).base_model == "other/model"


def test_a_named_template_comes_over_the_runs(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", chat_template="chatml")
    assert resolve_model(str(run), None, None, chat_template="zephyr").chat_template == "zephyr"
    assert resolve_model(str(run / "heads"), None, None, chat_template="zephyr").chat_template == "zephyr"
    assert resolve_model(None, "some/model", None, chat_template="zephyr").chat_template == "zephyr"


def test_a_run_may_trust_its_own_backbones_code_and_no_other(tmp_path: Path) -> None:
    run = str(fake_run(tmp_path / "run", trust_remote_code=True))
    assert resolve_model(run, None, None).trust_remote_code
    assert not resolve_model(run, "other/model", None).trust_remote_code
    assert resolve_model(run, "other/model", None, trust_remote_code=True).trust_remote_code
    assert not resolve_model(str(fake_run(tmp_path / "plain")), None, None).trust_remote_code
    assert resolve_model(None, "some/model", None, trust_remote_code=True).trust_remote_code


@pytest.mark.parametrize(
    ("keys", "adapter", "quantization", "form"),
    [
        ({}, False, None, "unquantised"),
        ({"load_in_4bit": True}, False, "nf4", "nf4"),
        ({"load_in_8bit": True}, False, "int8", "int8"),
        ({"load_in_4bit": True}, True, "nf4", "nf4, dequantised, adapter folded in"),
        ({}, True, None, "adapter folded in"),
    ],
)
def test_heads_are_measured_over_the_backbone_that_they_were_trained_over(
    tmp_path: Path, keys: dict[str, bool], adapter: bool, quantization: str | None, form: str
) -> None:
    run = fake_run(tmp_path / "run", **keys)
    if adapter:
        (run / "adapter").mkdir()
        (run / "adapter" / "adapter_config.json").write_text("{}")
    paths = resolve_model(str(run), None, None)
    assert (paths.quantization, paths.backbone_form) == (quantization, form)


def test_a_backbone_that_a_run_trained_itself_is_not_quantised(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", load_in_4bit=True)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert resolve_model(str(run), None, None).quantization is None


def test_heads_over_four_bits_are_loaded_over_four_bits(run_dir: Path) -> None:
    pytest.importorskip("bitsandbytes")
    subject = load_with_draft(replace(resolve_model(str(run_dir), None, None), quantization="nf4"), "float32")
    assert subject.backbone.model.is_quantized
    assert subject.draft is not None
    assert subject.draft.num_heads == 3


def test_the_heads_directory_of_a_run_is_that_run(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    assert resolve_model(str(run / "heads"), None, None) == resolve_model(str(run), None, None)


def test_heads_alone_name_their_backbone_in_config_json(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="--base-model"):
        resolve_model(str(tmp_path), None, None)
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    paths = resolve_model(str(tmp_path), None, None)
    assert (paths.base_model, paths.heads, paths.tree) == ("some/model", tmp_path, None)


def test_a_backbone_alone_has_neither_heads_nor_tree() -> None:
    paths = resolve_model(None, "some/model", None)
    assert (paths.heads, paths.tree, paths.name) == (None, None, None)
    assert paths.home.parts[-2:] == ("baselines", "model")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run"):
        resolve_model(str(tmp_path), None, None)
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model(str(tmp_path / "absent"), None, None)
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_model(str(fake_run(tmp_path / "run")), None, tmp_path / "no-tree.json")


def test_a_run_without_a_tree_decodes_a_chain(tmp_path: Path) -> None:
    paths = resolve_model(str(fake_run(tmp_path / "run", tree=False)), None, None)
    assert load_tree(paths, num_heads=4) == Tree.chain(4)


def test_a_tree_deeper_than_the_heads_is_refused(tmp_path: Path) -> None:
    paths = resolve_model(str(fake_run(tmp_path / "run")), None, None)
    assert load_tree(paths, num_heads=2) == Tree.chain(2)
    with pytest.raises(CheckpointError, match="2 deep, but there are only 1 heads"):
        load_tree(paths, num_heads=1)


def test_loads_backbone_heads_and_tree(run_dir: Path) -> None:
    subject = load_with_draft(resolve_model(str(run_dir), None, None), "bfloat16")
    assert subject.draft is not None
    assert subject.draft.num_heads == 3
    assert subject.tree == Tree.cartesian([2, 2])
    assert str(subject.backbone.dtype) == "torch.bfloat16"


def test_what_is_compiled_is_kept_in_the_run_or_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert compile_cache_dir(tmp_path) == tmp_path.resolve() / "compiled"
    cache_dir()  # torch names its own default in the environment as soon as it is asked
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    assert compile_cache_dir(tmp_path) == tmp_path.resolve() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert compile_cache_dir(tmp_path) == tmp_path / "elsewhere"
