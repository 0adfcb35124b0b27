"""An import streams: the memory it takes does not grow with the model."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxtext.convert import safetensors
from maxtext.convert.config_json import write_config
from maxtext.convert.families import FAMILIES
from maxtext.convert.mapping import places
from maxtext.convert.saved import open_saved
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
# Runs one command and prints how much more memory the process took than when everything was imported.
MEASURE = """
import json, resource, sys
import orbax.checkpoint, tensorstore
from maxtext.convert.commands import run

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

before = peak()
code = run(sys.argv[1:])
print(json.dumps([code, peak() - before]))
"""


def run_measured(*arguments):
    """(exit code, growth of the peak of resident memory in bytes) of one command in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], cwd=ROOT, check=True, text=True,
                          capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_of_import_and_export_is_that_of_one_array(tmp_path):
    """A bfloat16 folder of 290 MB, so 580 MB in float32: the largest array, of the embedding, has 64 MiB."""
    model = tiny_model(vocab_size=16384, d_model=1024, n_layers=9, n_heads=16, n_kv_heads=8, head_dim=64, d_ff=3072,
                       window=64)
    family = FAMILIES["olmo3"]
    shapes = {name: place.shape for name, place in places(family.rules, model).items()}
    source, dtype = tmp_path / "source", np.dtype(ml_dtypes.bfloat16)
    source.mkdir()
    with safetensors.Writer(str(source / "model.safetensors"), shapes, dtype) as writer:
        for number, (name, shape) in enumerate(shapes.items()):
            writer.write(name, np.full(shape, number, dtype))
    (source / "config.json").write_text(json.dumps(write_config(family, model, "bfloat16", 64, {})))
    size = (source / "model.safetensors").stat().st_size
    assert size > 280 * MIB
    code, grown = run_measured("import", source, tmp_path / "out")
    print(f"import of {size / MIB:.0f} MiB took {grown / MIB:.0f} MiB more memory")
    assert code == 0
    assert grown < 300 * MIB
    assert float(open_saved(str(tmp_path / "out")).leaf("params.norm")[0]) == list(shapes).index("model.norm.weight")
    code, grown = run_measured("export", tmp_path / "out", tmp_path / "hf")
    print(f"export took {grown / MIB:.0f} MiB more memory")
    assert code == 0
    assert grown < 400 * MIB
    with open(tmp_path / "hf" / "model.safetensors", "rb") as a, open(source / "model.safetensors", "rb") as b:
        assert a.read() == b.read()
