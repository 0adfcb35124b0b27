"""The commands of docs/data.md, each on small files of its format."""

import gzip
import json
import shlex

import pytest

from maxtext import cli
from tests.data.record_files import TEXTS, example, jsonl, rows, tfrecord, write_megatron, write_tfds
from tests.materials import imported
from tests.page_commands import ROOT, mentioned, shown

PAGE = (ROOT / "docs" / "data.md").read_text()
STREAMS = [line for line in shown(PAGE) if " train " in line]
SOURCES = [line for line in shown(PAGE) if " data prepare " in line]


def write(folder, line: str) -> None:
    """The files that the source of a command names."""
    path = folder / shlex.split(line.split("$TEXT/")[1])[0]
    folder.mkdir()
    if path.name == "notes":
        path.mkdir()
        for i, text in enumerate(TEXTS):
            (path / f"{i}.txt").write_text(text, newline="")
    elif path.name == "web.jsonl":
        path.write_bytes(jsonl())
    elif path.name == "*.jsonl.gz":
        (folder / "web.jsonl.gz").write_bytes(gzip.compress(jsonl() + b"no JSON\n"))
    elif path.name == "web.jsonl.zst":
        with pytest.importorskip("pyarrow").output_stream(path, compression="zstd") as file:
            file.write(jsonl())
    elif path.name == "web.parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"body": TEXTS}), path)
    elif path.name == "web.array_record":
        writer = pytest.importorskip("array_record.python.array_record_module").ArrayRecordWriter(str(path), "")
        for text in TEXTS:
            writer.write(example(text=text.encode()))
        writer.close()
    elif path.name == "web.tfrecord":
        path.write_bytes(tfrecord([example(text=text.encode()) for text in TEXTS]))
    elif path.name == "1.0.0#train":
        assert write_tfds(folder) == folder / "tiny" / "1.0.0"
    elif path.name == "saved#train":
        datasets = imported("datasets")
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows())).save_to_disk(folder / "saved")
    else:
        assert path.name == "corpus.bin"
        write_megatron(folder / "corpus", [[list(text.encode())] for text in TEXTS])


def test_the_page_has_a_command_for_each_source():
    table = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(table) == 8
    assert len(SOURCES) == 10, "JSON lines in three kinds"
    verbs = {line.split()[2] for line in (*shown(PAGE), *mentioned(PAGE)) if line.startswith("maxtext data ")}
    assert verbs == {"prepare", "inspect", "stats", "overlap"}


@pytest.mark.parametrize("line", SOURCES, ids=lambda line: line.split("$OUT/")[1].split()[0])
def test_each_source_gives_the_20_documents(tmp_path, monkeypatch, line):
    write(tmp_path / "text", line)
    words = shlex.split(line.replace("$TEXT", str(tmp_path / "text")).replace("$OUT", str(tmp_path / "out")))
    assert cli.main([*words[1:], "--heldout-fraction", f"{words[words.index('--source') + 1].split('=')[0]}=0"]) == 0
    out = next((tmp_path / "out").iterdir())
    manifest = json.loads((out / "dataset.json").read_text())
    name, source = next(iter(manifest["sources"].items()))
    assert source["train"]["documents"] == 20
    data = (out / "train" / f"{name}-00000.npy").read_bytes()
    assert len(data) == 2 * sum(len(text.encode()) + 1 for text in TEXTS)
    assert manifest["dropped"]["bad"] == ("--max-bad" in line)


def write_config(folder):
    config = folder / "run.yml"
    config.write_text(f"model: {{vocab_size: 300, d_model: 8, n_layers: 1, n_heads: 1, d_ff: 8}}\n"
                      f"data: {{prepared: {folder / 'out' / 'jsonl'}, sequence_length: 64}}\noptim: {{lr: 0.001}}\n"
                      f"train: {{steps: 5, global_batch: 8}}\noutput_dir: {folder}\n")
    return config


def test_looking_at_it(tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "out"
    write(text, SOURCES[1])
    (text / "quiz.jsonl").write_bytes(jsonl(TEXTS[-2:]))
    config = write_config(tmp_path)
    lines = [SOURCES[1] + " --heldout-fraction web=0", *(line for line in shown(PAGE) if line not in SOURCES + STREAMS)]
    assert len(lines) == 5
    for line in lines:
        for name, path in (("$CONFIG", config), ("$TEXT", text), ("$OUT", out)):
            line = line.replace(name, str(path))
        assert cli.main(shlex.split(line)[1:]) == 0
    assert "quiz: 2 of 2 documents with 13-grams" in capsys.readouterr().out


@pytest.mark.parametrize("line", STREAMS, ids=lambda line: line.split("kind=")[1].split()[0])
def test_a_stream_trains_stops_and_goes_on(tmp_path, capsys, line):
    imported(line.split("kind=")[1].split()[0].replace("hf", "datasets"))
    text = tmp_path / "text"
    write(text, SOURCES[1])
    prepared = SOURCES[1].replace("$TEXT", str(text)).replace("$OUT", str(tmp_path / "out"))
    assert cli.main([*shlex.split(prepared)[1:], "--heldout-fraction", "web=0"]) == 0
    words = shlex.split(line.replace("$CONFIG", str(write_config(tmp_path))).replace("$TEXT", str(text)))[1:]
    run = tmp_path / words[words.index("train") + 2].removeprefix("run_name=")
    quiet = ["log.tensorboard=false", "log.report=false"]
    assert cli.main([*words, *quiet, "train.steps=3", "schedule.total_steps=5"]) == 0
    assert cli.main([*words, *quiet, "schedule.total_steps=5"]) == 0
    told = capsys.readouterr().out
    assert "files in order, not shuffled; resumes exactly" in " ".join(told.split())
    assert "resuming" in told
    records = [json.loads(record) for record in (run / "metrics.jsonl").read_text().splitlines()]
    size = sum(len(text.encode()) + 1 for text in TEXTS)  # three batches of 512, a padded one, and the next pass
    assert [record["data/tokens/stream"] for record in records[1:]] == [512, 1024, 1536, size, size + 512]
    assert cli.main(["data", "inspect", str(run / "config.yml"), "--step", "1"]) == 2
    assert "a stream is read once, in order" in capsys.readouterr().err
