"""`maxtext launch gke`: manifests that the schemas of Kubernetes, JobSet and PathwaysJob accept, and what they say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxtext.cli import main
from maxtext.config.load import load
from maxtext.launch.gke import machine
from maxtext.launch.job import dns_label
from maxtext.parallel import launch as joining
from tests.materials import imported

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.33.0"
WORDS = ["launch", "gke", "quickstart", "--image", "europe-docker.pkg.dev/p/r/maxtext:1", "--claim", "data:/data",
         "--dry-run", "output_dir=/data/runs", "data.prepared=/data/quickstart", "train.global_batch=64"]
TPU = ["--topology", "v6e:4x4", "mesh.fsdp=-1"]
PATHWAYS = [*TPU, "--slices", "4", "--pathways", "--scratch", "gs://b/scratch"]
VARIANTS = {
    "one slice": TPU,
    "one host": ["--topology", "v6e:2x4", "mesh.fsdp=-1", "--namespace", "research"],
    "two slices": [
        *TPU, "--slices", "2", "--queue", "research", "--bucket", "b:/bucket", "--folder", "/bucket/data",
        "--service-account", "me"],
    "GPUs": ["--topology", "h100:4x8", "mesh.fsdp=-1"],
    "Pathways": PATHWAYS,
    "elastic": [*PATHWAYS, "--elastic-slices", "2"],
}


@pytest.fixture
def rendered(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], list[dict[str, Any]]]:
    def render(words: list[str]) -> list[dict[str, Any]]:
        assert main([*WORDS, *words]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return render


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The template of the pods that train."""
    spec = workload["spec"]
    return spec["controller"]["template"] if "controller" in spec else \
        spec["replicatedJobs"][0]["template"]["spec"]["template"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_schemas_accept_what_is_rendered(variant: str, rendered):
    jsonschema, kubernetes = imported("jsonschema"), imported("kubernetes_validate")
    config, workload = rendered(VARIANTS[variant])
    schema = json.loads((SCHEMAS / f"{workload['kind'].lower()}.json").read_text())
    jsonschema.validate(workload, schema)
    kubernetes.validate(config, KUBERNETES, strict=True)
    if workload["kind"] == "JobSet":
        (one,) = workload["spec"]["replicatedJobs"]
        kubernetes.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}} | one["template"],
                            KUBERNETES, strict=True)
    kubernetes.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}} | pod_of(workload),
                        KUBERNETES, strict=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(workload | {"spec": workload["spec"] | {"replicas": 1}}, schema)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pods_train_on_the_very_config_that_was_checked(variant: str, rendered, tmp_path: Path):
    config, workload = rendered(VARIANTS[variant])
    (tmp_path / "config.yml").write_text(config["data"]["config.yml"])
    assert load(tmp_path / "config.yml") == load("quickstart", [word for word in [*WORDS, *VARIANTS[variant]]
                                                               if "=" in word])
    spec = pod_of(workload)["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert container["args"] == ["train", "/etc/maxtext/config.yml"]
    assert mounted["/etc/maxtext"]["configMap"]["name"] == config["metadata"]["name"] == workload["metadata"]["name"]
    assert mounted["/data"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert spec["terminationGracePeriodSeconds"] >= 60, "time for a save"


def test_a_mistake_or_failed_training_is_not_restarted_and_all_else_is(rendered):
    _, workload = rendered(TPU)
    policy = workload["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 10
    assert policy["rules"] == [
        {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    spec = workload["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 3]}}
    assert spec["template"]["spec"]["containers"][0]["name"] == "train"


def test_slices_are_taken_whole_and_told_of_each_other(rendered):
    _, workload = rendered(VARIANTS["two slices"])
    (one,) = workload["spec"]["replicatedJobs"]
    spec = one["template"]["spec"]
    assert (one["replicas"], spec["parallelism"], spec["completions"]) == (2, 4, 4)
    assert one["template"]["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    pod = pod_of(workload)
    assert pod["spec"]["nodeSelector"] == {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
                                           "cloud.google.com/gke-tpu-topology": "4x4"}
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["spec"]["containers"][0]["workingDir"] == "/bucket/data"
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    variables = environment(pod)
    assert variables["MEGASCALE_NUM_SLICES"] == "2"
    assert variables["MEGASCALE_COORDINATOR_ADDRESS"] == "quickstart-slice-0-0.quickstart:8080"
    assert joining.job(variables) == "Cloud TPU"
    assert workload["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}


def test_gpu_hosts_are_one_indexed_job_whose_pods_join(rendered):
    _, workload = rendered(VARIANTS["GPUs"])
    (one,) = workload["spec"]["replicatedJobs"]
    spec = one["template"]["spec"]
    assert (one["replicas"], spec["parallelism"], spec["completions"], spec["completionMode"]) == (1, 4, 4, "Indexed")
    pod = pod_of(workload)
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert joining.job(environment(pod) | {"JOB_COMPLETION_INDEX": "3"}) == \
        "JAX's variables in a Kubernetes Indexed Job"


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"] if "value" in one}


def test_pathways_bears_the_loss_of_some_slices(rendered):
    _, workload = rendered(VARIANTS["elastic"])
    spec = workload["spec"]
    assert spec["workers"] == [{"type": "ct6e-standard-4t", "topology": "4x4", "numSlices": 4, "maxSliceRestarts": 10}]
    assert (spec["controller"]["elasticSlices"], spec["controller"]["mainContainerName"]) == (2, "train")
    assert "elasticSlices" not in rendered(PATHWAYS)[1]["spec"]["controller"]


@pytest.mark.parametrize(("text", "hosts", "chips"), [
    ("v6e:1x1", 1, 1), ("v6e:2x2", 1, 4), ("v6e:2x4", 1, 8), ("v6e:4x4", 4, 4), ("v6e:16x16", 64, 4),
    ("v5p:2x2x1", 1, 4), ("v5p:4x4x4", 16, 4), ("tpu7x:4x4x4", 16, 4), ("h100:4x8", 4, 8), ("b200:1x4", 1, 4)])
def test_machines_of_a_topology(text: str, hosts: int, chips: int):
    found = machine(text)
    assert not isinstance(found, str)
    assert (found.hosts, found.chips) == (hosts, chips)


@pytest.mark.parametrize(("words", "message"), [
    (["--topology", "v6e:4"], "--topology v6e:4: give a TPU slice, such as v5e:4x4, v5p:4x4x4,"),
    (["--topology", "v9:4x4"], "--topology v9:4x4: give a TPU slice"),
    (["--topology", "v6e:3x3", "mesh.fsdp=-1"], "--topology v6e:3x3: give"),
    (["--topology", "v6e:4x4", "mesh.fsdp=8"], "mesh.data 1 x mesh.fsdp 8 x mesh.tensor 1 = 8 devices, but"),
    (["--topology", "v6e:4x4", "mesh.fsdp=-1", "--name", "My_Run"], "--name My_Run: give lower-case letters,"),
    (["--topology", "tpu7x:2x2x1", "mesh.fsdp=-1", "--pathways", "--scratch", "gs://b"],
     "--pathways: GKE's Pathways has no machine type for tpu7x"),
])
def test_what_cannot_be_launched_is_told_in_a_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(("words", "message"), [
    (["--pathways"], "--pathways needs --scratch gs://BUCKET/FOLDER"),
    (["--elastic-slices", "1"], "only go with --pathways"),
    (["--pathways", "--scratch", "gs://b", "--elastic-slices", "1"], "--elastic-slices 1 of --slices 1: at least one"),
    (["--claim", "data"], "data: give NAME:PATH with an absolute path"),
    (["--slices", "0"], "--slices 0: give 1 or more"),
])
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *TPU, *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_manifest_goes_to_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]):
    program, words = tmp_path / "kubectl", [word for word in [*WORDS, *TPU] if word != "--dry-run"]
    monkeypatch.setenv("PATH", "")
    assert main(words) == 2
    assert "kubectl is not on this machine's PATH: install it" in capsys.readouterr().err
    program.write_text(f"#!/bin/bash\necho \"$@\" > {tmp_path}/words\ncat > {tmp_path}/given\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert main(words) == 0
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert [one["kind"] for one in yaml.safe_load_all((tmp_path / "given").read_text())] == ["ConfigMap", "JobSet"]
    program.write_text("#!/bin/bash\nexit 1\n")
    assert main(words) == 2


@pytest.mark.parametrize(("name", "label"), [
    ("OLMo3_7B stage-2", "olmo3-7b-stage-2"), ("7b", "run-7b"), ("a" * 60, "a" * 40), ("x" * 39 + "-y", "x" * 39)])
def test_a_run_name_becomes_a_label(name: str, label: str):
    assert dns_label(name) == label


def test_under_pathways_the_client_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(joining.LaunchError, match=r"needs pathwaysutils; install it with: pip install 'maxtext\[path"):
        joining.join_processes({"JAX_PLATFORMS": "proxy"})
