"""One of two processes of 4 devices each; writes what it read. Run by test_pipeline.py: port rank out files...

With masking and a filter, so that every array of a batch is there. Data that differ between the processes are refused
on both; the message is then all that is written.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxtext.config import schema
from maxtext.data import DataError
from maxtext.data.pipeline import Batches, fingerprint, make_batches
from maxtext.data.tokens import resolve


def main(port: str, rank: str, out: str, *files: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    cfg = schema.Config(
        model=schema.ModelConfig(vocab_size=1000, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=16, vocab_size=1000, eos_id=0, pad_id=1, document_masking=True,
                               instance_filter=schema.InstanceFilterConfig(enabled=True, max_period=1, max_count=3),
                               sources={"x": schema.SourceConfig(paths=files)}),
        optim=schema.OptimConfig(lr=1e-3), train=schema.TrainConfig(steps=9, global_batch=16),
        output_dir=os.path.dirname(out))
    # Devices of the processes alternate, so that the rows of a process are not one range.
    devices = np.array(jax.devices()).reshape(2, 4).T.ravel()
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), open(out, "w") as file:
        try:
            batches = make_batches(cfg, resolve(cfg), NamedSharding(mesh, PartitionSpec("fsdp")))
        except DataError as error:
            json.dump({"refused": str(error)}, file)
            return
        json.dump(read(batches), file)
        batches.close()


def read(batches: Batches) -> dict:
    """What this process holds of four batches: rows of each array, in the order of the global batch."""
    result: dict = {"rows": batches._rows.tolist(), "fingerprints": []}
    for _ in range(4):
        batch = next(batches)
        for name in ("tokens_BT", "weights_BT", "segments_BT", "rejected_B"):
            array = getattr(batch, name)
            assert isinstance(array, jax.Array)
            assert array.shape == (16, 16)[:array.ndim]
            shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            result.setdefault(name, []).append(np.concatenate([shard.data for shard in shards]).tolist())
        result["fingerprints"].append(int(jax.jit(fingerprint)(batch)))
    return result


main(*sys.argv[1:])
