"""`maxtext launch gke CONFIG --topology CHIP:SHAPE --image IMAGE`: a run as a JobSet on Google's Kubernetes, or through
Pathways, as a PathwaysJob, from which its operator makes a JobSet.

The config is resolved and checked here, and travels in a ConfigMap. Kubernetes restarts the job when a pod dies, but
not when the run ended with a mistake (exit status 2) or failed (3). Sources: the API types of kubernetes-sigs/jobset
v1alpha2 and google/pathways-job v1; GKE's pages on TPU slices and GPUs for the node labels.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from maxtext.config.arguments import Arguments
from maxtext.launch import job

CONFIG_FOLDER = "/etc/maxtext"
PORT = 8476  # of JAX's coordinator, in the first pod
MEGASCALE_PORT = 8080


@dataclasses.dataclass(frozen=True)
class TpuKind:
    """A TPU as GKE names it: its node label, the start of its machine types, and the sizes that are one machine."""

    accelerator: str
    machine: str | None  # None: Pathways has no machine type for it
    dims: int
    chips_per_host: int = 4
    one_host: tuple[str, ...] = ("1x1", "2x2", "2x4")


TPUS = {
    "v5e": TpuKind("tpu-v5-lite-podslice", "ct5lp-hightpu", 2),
    "v5p": TpuKind("tpu-v5p-slice", "ct5p-hightpu", 3, one_host=("2x2x1",)),
    "v6e": TpuKind("tpu-v6e-slice", "ct6e-standard", 2),
    "tpu7x": TpuKind("tpu7x", None, 3, one_host=("2x2x1",)),
}
GPUS = {"a100": "nvidia-a100-80gb", "h100": "nvidia-h100-80gb", "h100-mega": "nvidia-h100-mega-80gb",
        "h200": "nvidia-h200-141gb", "b200": "nvidia-b200"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a job runs on: so many hosts of a slice (or of the job, with GPUs), with so many chips each."""

    kind: str
    shape: str
    hosts: int
    chips: int  # of a host

    @property
    def selector(self) -> dict[str, str]:
        if self.kind in GPUS:
            return {"cloud.google.com/gke-accelerator": GPUS[self.kind]}
        return {"cloud.google.com/gke-tpu-accelerator": TPUS[self.kind].accelerator,
                "cloud.google.com/gke-tpu-topology": self.shape}

    @property
    def resource(self) -> str:
        return "nvidia.com/gpu" if self.kind in GPUS else "google.com/tpu"


def machine(text: str) -> Machine | str:
    """`v6e:4x4`, or `h100:4x8` for 4 hosts of 8 GPUs; a message where it is neither."""
    kind, _, shape = text.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if kind in GPUS and len(sizes) == 2:
        return Machine(kind, shape, sizes[0], sizes[1])
    if kind in TPUS and len(sizes) == TPUS[kind].dims:
        chips, tpu = math.prod(sizes), TPUS[kind]
        if shape in tpu.one_host or chips <= tpu.chips_per_host:
            return Machine(kind, shape, 1, chips)
        if chips % tpu.chips_per_host == 0:
            return Machine(kind, shape, chips // tpu.chips_per_host, tpu.chips_per_host)
    slices = ", ".join(f"{name}:{'x'.join('4' * tpu.dims)}" for name, tpu in TPUS.items())
    return (f"--topology {text}: give a TPU slice, such as {slices}, or hosts and GPUs of each, such as "
            f"{', '.join(f'{name}:4x8' for name in GPUS)}")


def run(argv: Sequence[str]) -> int:
    """Runs the verb. Exit status: 0 handed over or printed, 2 a mistake in what was asked for."""
    options = _options(argv)
    where = machine(options.topology)
    if isinstance(where, str):
        return job.mistake(where)
    if options.pathways and (where.kind not in TPUS or TPUS[where.kind].machine is None):
        return job.mistake(f"--pathways: GKE's Pathways has no machine type for {where.kind}; leave --pathways away")
    found = job.loaded(options.config, options.overrides, where.hosts * where.chips * options.slices)
    if isinstance(found, int):
        return found
    cfg, text = found
    name = options.name or job.dns_label(cfg.run_name)
    if name != job.dns_label(name):
        return job.mistake(f"--name {name}: give lower-case letters, digits and dashes, such as {job.dns_label(name)}")
    workload = pathways_job if options.pathways else job_set
    manifests = [config_map(name, text, options.namespace), workload(name, where, options)]
    rendered = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    return job.hand_over(rendered, ["kubectl", "apply", "-f", "-"], "install it and connect it to the cluster (gcloud "
                         "container clusters get-credentials), or take the manifest elsewhere: --dry-run > job.yaml",
                         dry_run=options.dry_run)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(
        prog="maxtext launch gke", description="Train a run as a JobSet on GKE: a pod a machine, restarted by "
        "Kubernetes when one dies, from the newest checkpoint. Without --dry-run the manifest, in which the config is "
        "resolved, goes to kubectl.")
    job.add_config(parser, "output_dir=/data/runs")
    parser.add_argument("--topology", required=True, metavar="CHIP:SHAPE",
                        help="a TPU slice (v6e:4x4, v5p:4x4x4), or hosts and GPUs of each (h100:4x8)")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="slices of that shape (1)")
    parser.add_argument("--image", required=True, help="container image of this project (see the Dockerfile)")
    parser.add_argument("--claim", action="append", default=[], metavar="NAME:PATH",
                        help="a PersistentVolumeClaim that all pods mount, for data and output_dir; repeatable")
    parser.add_argument("--bucket", action="append", default=[], metavar="NAME:PATH",
                        help="a Cloud Storage bucket, mounted by GKE's Cloud Storage FUSE driver; repeatable")
    parser.add_argument("--folder", metavar="PATH", help="where the run starts, for relative paths of the config (the "
                        "image's)")
    parser.add_argument("--name", help="of the JobSet (from run_name)")
    parser.add_argument("--namespace", help="of the cluster")
    parser.add_argument("--service-account", metavar="NAME", help="of the pods, which may use the bucket")
    parser.add_argument("--queue", metavar="NAME", help="queue of Kueue that admits the job")
    parser.add_argument("--restarts", type=int, default=10, metavar="N", help="of the whole job, after lost pods (10)")
    parser.add_argument("--pathways", action="store_true", help="through Pathways: one controller drives all slices")
    parser.add_argument("--elastic-slices", type=int, default=0, metavar="N",
                        help="with --pathways: slices that may be missing while the job goes on (0)")
    parser.add_argument("--slice-restarts", type=int, default=10, metavar="N",
                        help="with --pathways: of the workers of one slice (10)")
    parser.add_argument("--scratch", metavar="gs://...", help="with --pathways: folder for its own files")
    parser.add_argument("--dry-run", action="store_true", help="print the manifest instead of handing it to kubectl")
    options = parser.parse_intermixed_args(list(argv))
    job.check_lowest(parser, options, slices=1, restarts=0, elastic_slices=0, slice_restarts=0)
    if options.pathways and options.scratch is None:
        parser.error("--pathways needs --scratch gs://BUCKET/FOLDER, where Pathways keeps its own files")
    if not options.pathways and (options.elastic_slices or options.scratch):
        parser.error("--elastic-slices and --scratch only go with --pathways")
    if options.elastic_slices >= options.slices and options.elastic_slices:
        parser.error(f"--elastic-slices {options.elastic_slices} of --slices {options.slices}: at least one slice must "
                     "be there; give less")
    for mount in (*options.claim, *options.bucket):
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*:/.+", mount):
            parser.error(f"{mount}: give NAME:PATH with an absolute path, such as data:/data")
    return options


def config_map(name: str, config: str, namespace: str | None) -> dict[str, Any]:
    """The resolved config, for the pods to mount."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, namespace),
            "data": {"config.yml": config}}


def job_set(name: str, where: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """One replicated job a slice; a pod a host."""
    gpu, hosts = where.kind in GPUS, where.hosts * options.slices
    environment: list[dict[str, Any]] = []
    if gpu and hosts > 1:
        # Pod 0 of job 0; each pod knows its own number, as its job is an Indexed one (parallel/launch.py).
        environment = [_variable("JAX_COORDINATOR_ADDRESS", f"{name}-slice-0-0.{name}:{PORT}"),
                       _variable("JAX_NUM_PROCESSES", str(hosts))]
    elif options.slices > 1:  # within a slice GKE tells the pods of each other
        environment = [_variable("MEGASCALE_COORDINATOR_ADDRESS", f"{name}-slice-0-0.{name}:{MEGASCALE_PORT}"),
                       _variable("MEGASCALE_NUM_SLICES", str(options.slices)),
                       {"name": "MEGASCALE_SLICE_ID", "valueFrom": {"fieldRef": {
                           "fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}}}]
    container = _container(options, environment, {where.resource: where.chips})
    container["ports"] = [{"containerPort": PORT}, {"containerPort": MEGASCALE_PORT}]
    pod = _pod(name, options, container)
    pod["spec"]["nodeSelector"] = where.selector
    # GPUs: one Indexed Job of all hosts, so that its indices number the processes. TPUs: a job a slice.
    replicas, pods = (1, hosts) if gpu else (options.slices, where.hosts)
    one_job = {
        "metadata": {"annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}},
        "spec": {"completionMode": "Indexed", "parallelism": pods, "completions": pods, "backoffLimit": 0,
                 "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {
                     "containerName": container["name"], "operator": "In", "values": list(job.HOPELESS)}}]},
                 "template": pod}}
    if gpu:
        del one_job["metadata"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": _metadata(name, options.namespace, options.queue),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": options.restarts, "restartStrategy": "BlockingRecreate", "rules": [
                {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
            "replicatedJobs": [{"name": "slice", "replicas": replicas, "template": one_job}]}}


def pathways_job(name: str, where: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """One pod that trains on the devices of all slices, whose workers Pathways runs and restarts slice by slice."""
    pod = _pod(name, options, _container(options, [], None))
    tpu = TPUS[where.kind]
    return {
        "apiVersion": "pathways-job.pathways.domain/v1", "kind": "PathwaysJob",
        "metadata": _metadata(name, options.namespace, options.queue),
        "spec": {
            "maxRestarts": options.restarts, "pathwaysDir": options.scratch,
            "workers": [{"type": f"{tpu.machine}-{where.chips}t", "topology": where.shape, "numSlices": options.slices,
                         "maxSliceRestarts": options.slice_restarts}],
            "controller": {"deploymentMode": "default", "mainContainerName": "train", "template": pod}
            | ({"elasticSlices": options.elastic_slices} if options.elastic_slices else {})}}


def _metadata(name: str, namespace: str | None, queue: str | None = None) -> dict[str, Any]:
    return {"name": name} | ({"namespace": namespace} if namespace else {}) | (
        {"labels": {"kueue.x-k8s.io/queue-name": queue}} if queue else {})


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _container(options: argparse.Namespace, environment: list[dict[str, Any]], limits: dict[str, int] | None
               ) -> dict[str, Any]:
    mounts = [{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}]
    for index, mount in enumerate((*options.claim, *options.bucket)):
        mounts.append({"name": f"volume-{index}", "mountPath": mount.partition(":")[2]})
    return {"name": "train", "image": options.image, "args": ["train", f"{CONFIG_FOLDER}/config.yml"],
            "env": [_variable("PYTHONUNBUFFERED", "1"), *environment], "volumeMounts": mounts
            } | ({"workingDir": options.folder} if options.folder else {}
                 ) | ({"resources": {"limits": limits}} if limits else {})


def _pod(name: str, options: argparse.Namespace, container: dict[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": name}}]
    for index, mount in enumerate((*options.claim, *options.bucket)):
        source = mount.partition(":")[0]
        volumes.append({"name": f"volume-{index}"} | (
            {"persistentVolumeClaim": {"claimName": source}} if index < len(options.claim) else
            {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": source}}}))
    # A node that is drained sends SIGTERM: the run saves and ends within this time.
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 300, "containers": [container],
                            "volumes": volumes}
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    return ({"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}} if options.bucket else {}) | {"spec": spec}
