"""One of two processes of 4 devices each; writes what it read. Run by test_pipeline.py: port rank out files..."""

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
from maxtext.data.pipeline import fingerprint, make_batches
from maxtext.data.tokens import resolve


def main(port: str, rank: str, out: str, *files: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    cfg = schema.Config(
        model=schema.ModelConfig(vocab_size=1000, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=16, vocab_size=1000, eos_id=0, pad_id=1,
                               sources={"x": schema.SourceConfig(paths=files)}),
        optim=schema.OptimConfig(lr=1e-3), train=schema.TrainConfig(steps=9, global_batch=16),
        output_dir=os.path.dirname(out))
    # Devices of the processes alternate, so that the rows of a process are not one range.
    devices = np.array(jax.devices()).reshape(2, 4).T.ravel()
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    batches = make_batches(cfg, resolve(cfg), NamedSharding(mesh, PartitionSpec("fsdp")))
    result: dict = {"rows": batches._rows.tolist(), "fingerprints": [], "tokens": []}
    for _ in range(4):
        batch = next(batches)
        assert isinstance(batch.tokens_BT, jax.Array)
        shards = sorted(batch.tokens_BT.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        result["tokens"].append(np.concatenate([shard.data for shard in shards]).tolist())
        result["fingerprints"].append(int(jax.jit(fingerprint)(batch)))
    batches.close()
    with open(out, "w") as file:
        json.dump(result, file)


main(*sys.argv[1:])
