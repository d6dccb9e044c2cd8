"""An indexed Job for Kubernetes, with the service by which its pods find the first one.

Fields as in the Kubernetes API, `batch/v1` Job and `v1` Service, ConfigMap and
PersistentVolumeClaim.
"""

from __future__ import annotations

import shlex

from plait.jobs.agent import agent_lines
from plait.jobs.job import PORT, JobScript, TrainJob, yaml_text
from plait.values import JsonObject

GRACE_SECONDS = 30
"""Seconds between the deadline of a save and the end of a pod."""
WAIT_SECONDS = 3600
"""Seconds that pods wait for one that is replaced."""
RESTARTS = 20
"""Starts of a pod's ranks after others were lost."""
FAILURES = 10
"""Failures of a pod that count; the loss of the first pod is one for each other."""
CONFIG_FOLDER = "/config"
RUNS_FOLDER = "/runs"


def script(job: TrainJob, config_text: str = "") -> JobScript:
    """The manifests: config, volume, service and Job, in one file.

    Errors: `ConfigError` for a run's folder outside the volume.
    """
    parts = [_config_map(job, config_text), _volume(job), _service(job), _job(job)]
    head = [
        f"# {job.shape('pod')}.",
        "# A pod that is evicted or preempted gets SIGTERM, saves within the grace period, and is",
        "# started again without being counted as a failure; --resume auto goes on.",
    ]
    text = "\n".join(head) + "\n" + "\n---\n".join(yaml_text(part) for part in parts) + "\n"
    file = f"{job.name}.yaml"
    notes = ["the image is yours: plait and your code in it", "the volume must be ReadWriteMany"]
    submit = f"kubectl apply -f {shlex.quote(file)}"
    return JobScript("kubernetes", text, file, submit, job.world_size, notes)


def _config_map(job: TrainJob, config_text: str) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-config"},
        "data": {"config.toml": config_text or "# put your config here\n# or mount your own\n"},
    }


def _volume(job: TrainJob) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{job.name}-runs"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "500Gi"}},
        },
    }


def _service(job: TrainJob) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "store", "port": PORT}],
        },
    }


def _job(job: TrainJob) -> JsonObject:
    out = job.run_folder_below(RUNS_FOLDER)
    options = [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.name}",
        f"--rdzv-endpoint={job.name}-0.{job.name}:{PORT}",
        f'--rdzv-conf="is_host=$FIRST,read_timeout={WAIT_SECONDS},join_timeout={WAIT_SECONDS}"',
        f"--max-restarts={RESTARTS}",
    ]
    lines = [
        "# Pods meet at the first one, and wait an hour for one that is replaced. Each start has",
        "# a store of its own.",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        'FIRST=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo 1 || echo 0)',
        *agent_lines(job, options, job.train_line(f"{CONFIG_FOLDER}/config.toml", out)),
    ]
    container: JsonObject = {
        "name": "plait",
        "image": job.image,
        "command": ["/bin/bash", "-c", "\n".join(lines)],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "runs", "mountPath": RUNS_FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.ranks_per_node}}
    disrupted = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    codes = {"containerName": "plait", "operator": "In", "values": [143]}
    asked_to_end = {"action": "Ignore", "onExitCodes": codes}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": FAILURES * job.nodes,
            "podFailurePolicy": {"rules": [disrupted, asked_to_end]},
            "template": {
                "spec": {
                    "subdomain": job.name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": job.deadline_seconds + GRACE_SECONDS,
                    "containers": [container],
                    "volumes": [
                        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
                        {
                            "name": "runs",
                            "persistentVolumeClaim": {"claimName": f"{job.name}-runs"},
                        },
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    ],
                }
            },
        },
    }
