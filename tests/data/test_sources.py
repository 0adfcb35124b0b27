"""Official mix lists and files behind URLs."""

import sys

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError, storage
from maxtext.data.pipeline import make_batches
from maxtext.data.sources import read_mix
from maxtext.data.tokens import resolve

LIST = "# comment\nweb, a/{TOKENIZER}/two.npy\n\ncode,b/{TOKENIZER}/one.npy\nweb,c/{TOKENIZER}/two.npy\n"


@pytest.fixture
def official(tmp_path, monkeypatch):
    """A stand-in for the installed package ai2-olmo-core that fails when it is imported, with two lists."""
    package = tmp_path / "site" / "olmo_core"
    (package / "data" / "mixes").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it must only be found')")
    (package / "data" / "mixes" / "OLMo-mix-0625.txt").write_text(LIST)
    (package / "data" / "mixes" / "OLMo-longmino-mix-0625.txt").write_text(LIST)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "olmo_core", raising=False)
    return package


@pytest.mark.parametrize("name", ["OLMo-mix-0625", "OLMo-mix-0625.txt"])
def test_official_lists_are_found_in_the_installed_package(official, name):
    files = read_mix(name, "r", "allenai/dolma3-tokenizer")
    assert [tuple(file) for file in files] == [
        ("r/a/allenai/dolma3-tokenizer/two.npy", "web"), ("r/b/allenai/dolma3-tokenizer/one.npy", "code"),
        ("r/c/allenai/dolma3-tokenizer/two.npy", "web")]
    assert "olmo_core" not in sys.modules


def test_unknown_lists_name_the_nearest(official):
    with pytest.raises(DataError, match=r"OLMo-mix-0526: no such mix file, .*; did you mean OLMo-mix-0625\?"):
        read_mix("OLMo-mix-0526", "r", "t")
    with pytest.raises(DataError, match=r"x: no such mix file, .*; they are OLMo-longmino-mix-0625, OLMo-mix-0625"):
        read_mix("x", "r", "t")


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"OLMo-mix-0625: no such mix file.*pip install --no-deps ai2-olmo-core"):
        read_mix("OLMo-mix-0625", "r", "t")


def test_labels_are_kept_for_each_file(official, make_config, write_tokens, tmp_path):
    for name in ("a/t/two.npy", "b/t/one.npy", "c/t/two.npy"):
        write_tokens(f"root/{name}", 64)
    source = SourceConfig(mix="OLMo-mix-0625", root=str(tmp_path / "root"), tokenizer_placeholder="t")
    data = resolve(make_config({"x": source}))
    assert [(part.source, part.label) for part in data.parts] == [("x", "web"), ("x", "code"), ("x", "web")]


@pytest.fixture
def bucket():
    """Two token files in fsspec's memory, and a folder; returns their URL."""
    import fsspec

    memory = fsspec.filesystem("memory")
    tokens = {name: np.random.default_rng(len(name)).integers(2, 1000, 323).astype("<u2") for name in ("a", "bb")}
    for name, ids in tokens.items():
        memory.pipe_file(f"/bucket/{name}.npy", ids.tobytes())
    yield "memory://bucket", tokens
    memory.rm("/bucket", recursive=True)


def test_files_behind_a_url_are_read_in_pieces(bucket, make_config):
    url, tokens = bucket
    cfg = make_config({"x": SourceConfig(paths=("a.npy", "bb.npy"), root=url)}, batch=4)
    data = resolve(cfg)
    assert [part.path for part in data.parts] == [f"{url}/a.npy", f"{url}/bb.npy"]
    batches = make_batches(cfg, data)
    instances = np.concatenate([ids[:320].reshape(20, 16) for ids in tokens.values()])
    for step in range(1, 11):
        assert np.array_equal(next(batches).tokens_BT, instances[batches.instance_ids(step)])
    batches.close()
    assert storage.read(f"{url}/a.npy", 640, 100) == tokens["a"].tobytes()[640:]


@pytest.mark.parametrize(("path", "message"), [
    ("none.npy", r"memory://bucket/none.npy: no such file"), ("../bucket", r"is not a file|no such file"),
])
def test_bad_urls_are_refused(bucket, make_config, path, message):
    with pytest.raises(DataError, match=message):
        resolve(make_config({"x": SourceConfig(paths=(path,), root=bucket[0])}))


@pytest.mark.parametrize("url", ["gs://bucket/a.npy", "nonsense://bucket/a.npy"])
def test_urls_without_a_driver_say_to_mount_or_copy(make_config, url):
    with pytest.raises(DataError, match=f"{url}: this URL cannot be opened .*mount the bucket .* or copy the files"):
        resolve(make_config({"x": [url]}))


def test_errors_of_a_service_are_data_errors(bucket, make_config, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*_, **__):
        raise PermissionError("403 forbidden")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(DataError, match=r"a.npy: cannot read \(PermissionError: 403 forbidden\); check"):
        resolve(make_config({"x": SourceConfig(paths=("a.npy",), root=bucket[0])}))


def test_a_large_vocabulary_is_stored_in_four_bytes_and_nothing_else(make_config, write_tokens):
    """dolma2: 100,278 ids; two bytes do not hold them, and files of four are not read as two."""
    four = write_tokens("four.npy", np.random.default_rng(0).integers(0, 100278, 400), np.uint32)
    assert resolve(make_config({"x": [four]}, vocab_size=100278)).dtype == np.uint32
    with pytest.raises(DataError, match=r"data.dtype: uint16 ends at 65535, but data.vocab_size is 100278"):
        resolve(make_config({"x": [four]}, vocab_size=100278, dtype="uint16"))
    with pytest.raises(DataError, match=r"four.npy: looks like uint32 tokens, read as uint16"):
        resolve(make_config({"x": [four]}, vocab_size=65536, dtype="uint16", model_vocab=100352))
