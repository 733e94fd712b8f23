import subprocess
import sys

import pytest

import medusa_train
from medusa_train.errors import ConfigError, DataError


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import sys, medusa_train; medusa_train.load; assert not {'torch', 'transformers'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drafts_without_training_decode_in_place_of_heads() -> None:
    options = {"base_model": "data/tiny", "dtype": "float32"}
    plain = medusa_train.load(**options).generate("Write the word yes three times.", 24)
    drafted = medusa_train.load(**options, draft="prompt_lookup", draft_settings={"nodes": 4})
    assert drafted.reply("Write the word yes three times.", 24).read() == plain
    rest = medusa_train.load(
        **options, draft="rest", draft_settings={"datastore": "data/selfdistill/tiny.jsonl"}
    )
    assert rest.generate("Write the word yes three times.", 24) == plain
    lookahead = medusa_train.load(**options, draft="lookahead", draft_settings={"window": 3})
    assert lookahead.generate("Write the word yes three times.", 24) == plain
    with pytest.raises(DataError, match=r"no\.txt: no such file"):
        medusa_train.load(**options, draft="rest", draft_settings={"datastore": "no.txt"})
    with pytest.raises(ConfigError, match="unknown key; did you mean nodes"):
        medusa_train.load(**options, draft="prompt_lookup", draft_settings={"node": 4})
    with pytest.raises(ConfigError, match=r"must be .*got 'lookup'"):
        medusa_train.load(**options, draft="lookup")
