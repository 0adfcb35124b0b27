"""Two processes over loopback save one state, agree on what is damaged, and restore the same step."""

import re
import socket
import subprocess
import sys
from pathlib import Path

from maxtext.checkpoint.manager import Checkpoints
from tests.checkpoint.states import abstract, child_environment, config, found, host_bits, make_mesh, make_state
from tests.checkpoint.test_damage import flip

WORKER = """
import sys, jax
rank, port, directory, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank, local_device_ids=None)
from maxtext.checkpoint.integrity import tree_fingerprints
from maxtext.checkpoint.manager import Checkpoints, CheckpointError
from tests.checkpoint.states import abstract, config, make_mesh, make_state
mesh = make_mesh(8)
assert len(jax.local_devices()) == 4 and len(jax.devices()) == 8
checkpoints = Checkpoints(directory, config(keep_last=2))
if what == "save":
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(mesh, seed=step), {"step": step})
    checkpoints.wait()
else:
    restored = checkpoints.restore(abstract(mesh))
    assert tree_fingerprints(restored.state) == tree_fingerprints(make_state(mesh, seed=restored.step))
    assert restored.extra == {"step": restored.step}
    print("restored", restored.step)
    try:
        checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), "float32")})
    except CheckpointError as error:
        print("refused", "does not fit this model" in str(error))
checkpoints.close()
"""


def run_two(directory: Path, what: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**child_environment(), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(rank), port, str(directory), what], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        ends = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], [err[-3000:] for _, err in ends]
    return [out for out, _ in ends]


def test_two_processes(tmp_path: Path):
    run_two(tmp_path, "save")
    checkpoints = Checkpoints(str(tmp_path), config())
    assert checkpoints.steps() == [2, 3], "process 0 commits and deletes for both"
    for step in (2, 3):
        restored = found(checkpoints.restore(abstract(make_mesh(2, 2)), step))
        assert host_bits(restored.state) == host_bits(make_state(make_mesh(1), seed=step)), "read by one process"
    checkpoints.close()
    files = sorted(path for path in (tmp_path / "step_00000003").rglob("*") if path.is_file())
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {path.name for path in (tmp_path / "step_00000003").rglob("*")}
    flip(max(files, key=lambda path: path.stat().st_size))
    for out in run_two(tmp_path, "restore"):  # among lines that the collectives' library prints
        assert re.findall(r"restored \d+|refused \w+", out) == ["restored 2", "refused True"], "both fall back together"
    assert (tmp_path / "step_00000003.bad-1").is_dir()
