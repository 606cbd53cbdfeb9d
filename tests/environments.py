"""The variables that operators give the containers of a job, as read in running pods.

`tests/cluster/test_environments.py` reads them again, so a new operator that writes others is noticed;
`tests/unit/launch/test_plan.py` makes plans from them.
"""

from __future__ import annotations

PORT = "23456"
"""Of the operator, where the manifest names no `pytorchjob-port`."""


def elastic_worker(job: str, replicas: str = "1:3") -> dict[str, str]:
    """Every Worker of the manifests in k8s/ (elasticPolicy, no Master). Kubeflow training operator 1.9.3."""
    return {"PET_NNODES": replicas, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{job}-worker-0:{PORT}",
            "PET_NPROC_PER_NODE": "auto", "PET_MAX_RESTARTS": "100", "PYTHONUNBUFFERED": "1"}


def static_replica(job: str, rank: int, replicas: int) -> dict[str, str]:
    """A Master (rank 0) or Worker i (rank i + 1), without elasticPolicy. Kubeflow training operator 1.9.3."""
    return {"PET_NNODES": str(replicas), "PET_MASTER_ADDR": f"{job}-master-0", "PET_MASTER_PORT": PORT,
            "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "auto", "MASTER_ADDR": f"{job}-master-0",
            "MASTER_PORT": PORT, "WORLD_SIZE": str(replicas), "RANK": str(rank), "PYTHONUNBUFFERED": "1"}
