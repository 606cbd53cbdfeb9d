"""The environment becomes a plan: which torchrun this pod starts, and why.

Operators speak through variables. Kubeflow's set `PET_*`, which torchrun reads as defaults of its
options; Volcano sets only `MASTER_ADDR`, `RANK` and `WORLD_SIZE`. All of that is read here, once, and
handed to torchrun as explicit arguments. A pure function of its inputs: `ratchet plan` prints it.

* `elastic`: PET_RDZV_BACKEND (PyTorchJob with elasticPolicy). The number of pods may change.
* `static`: PET_NNODES with PET_MASTER_ADDR and PET_NODE_RANK (PyTorchJob with a Master, TrainJob), or
  MASTER_ADDR, RANK and WORLD_SIZE alone (Volcano; in an Indexed Job, JOB_COMPLETION_INDEX is the RANK).
  A fixed number of pods.
* `single`: nothing, or PET_STANDALONE. This machine alone, under an elastic torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.config import Config, ConfigError
from trainer.launch.resources import Resources

Mode = Literal["elastic", "static", "single"]

STOP_MARGIN_SECONDS = 5.0
"""What torchrun's own deadline leaves of the stop budget: to kill what is left and to say why."""

_DEFAULT_PORT = 29500
_QUICK_CONF = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3", "last_call_timeout": "10"}
"""A pod that is gone is noticed after 3 s (torch: 15) and a round with room left closes after 10 s
(torch: 30). Longer than a starved machine needs (clocks that differ do not count: `elastic.clocks`); a pod
that is taken for gone while ranks run loses nothing, because only the next round asks."""
_WITHOUT_EFFECT = ("PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE", "PET_NUMA_BINDING", "PET_VIRTUAL_LOCAL_RANK",
                   "PET_LOCAL_RANKS_FILTER", "PET_DUPLICATE_STDOUT_FILTERS", "PET_DUPLICATE_STDERR_FILTERS")
_HANDLED = ("PET_STANDALONE", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
            "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS",
            "PET_SHUTDOWN_TIMEOUT", "PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH")
"""Variables whose place our explicit arguments take. Others (PET_LOCAL_ADDR, PET_LOG_DIR, ...) pass through."""


@dataclass(frozen=True)
class LaunchPlan:
    """How this pod starts its ranks. What a mode does not use is empty."""

    mode: Mode
    why: str
    """The variables that decided the mode."""
    nodes_min: int
    nodes_max: int
    nproc: int
    """Ranks of this pod."""
    max_restarts: int
    rdzv_backend: str = ""
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    master_addr: str = ""
    master_port: int = 0
    node_rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set for torchrun and its ranks."""
    removed: tuple[str, ...] = ()
    """Variables that torchrun must not see, because the arguments say it."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def torchrun_arguments(self) -> list[str]:
        """Options of torchrun, without the program to run."""
        match self.mode:
            case "single":
                words = ["--standalone", "--nnodes=1"]
            case "static":
                words = [f"--nnodes={self.nodes_max}", f"--node-rank={self.node_rank}", "--rdzv-backend=static",
                         f"--master-addr={self.master_addr}", f"--master-port={self.master_port}"]
            case "elastic":
                words = [f"--nnodes={self.nodes_min}:{self.nodes_max}", f"--rdzv-backend={self.rdzv_backend}",
                         f"--rdzv-endpoint={self.rdzv_endpoint}", f"--rdzv-id={self.rdzv_id}"]
                if self.rdzv_conf:
                    words.append("--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in self.rdzv_conf.items()))
        return [*words, f"--nproc-per-node={self.nproc}", f"--max-restarts={self.max_restarts}"]

    @property
    def nodes(self) -> str:
        return str(self.nodes_max) if self.nodes_min == self.nodes_max else f"{self.nodes_min} to {self.nodes_max}"

    def child_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of torchrun, made from this process's own."""
        return {**{name: value for name, value in environ.items() if name not in self.removed}, **self.environment}


def make_plan(config: Config, resources: Resources, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """Read the environment.

    Raises:
        ConfigError: when it contradicts itself or lacks a part, naming the variable.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in environ:
        raise ConfigError("`ratchet run` starts torchrun itself and was started by one (TORCHELASTIC_RUN_ID is set):"
                          " run `torchrun ... -m trainer.ddp.worker` or `ratchet run` alone")
    notes: list[str] = []
    warnings: list[str] = []
    nproc = _nproc(config, resources, environ, notes, warnings)
    changes = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_shutdown_timeout(config))}
    if not environ.get("OMP_NUM_THREADS"):
        changes["OMP_NUM_THREADS"] = str(max(1, resources.cpus // nproc))
    if ignored := [name for name in _WITHOUT_EFFECT if environ.get(name)]:
        warnings.append(f"{', '.join(ignored)}: without effect, all ranks write to this pod's standard output")
    base = _Base(config, environ, nproc, changes, notes, warnings)

    nodes = _nodes(environ)
    backend = environ.get("PET_RDZV_BACKEND", "")
    if _is_standalone(environ):
        plan = base.single("PET_STANDALONE")
    elif backend and backend != "static":
        plan = base.elastic(backend, nodes or (1, 1))
    elif nodes and (nodes != (1, 1) or environ.get("PET_MASTER_ADDR") or environ.get("PET_NODE_RANK")):
        plan = base.static_from_pet(nodes)
    elif any(name.startswith("PET_") for name in environ) and nodes:
        plan = base.single("PET_NNODES=1 without a master")
    elif environ.get("RANK") or environ.get("WORLD_SIZE"):
        plan = base.static_from_plain()
    elif environ.get("JOB_COMPLETION_INDEX", "0") != "0":
        raise ConfigError(f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']}: in an Indexed Job of several pods"
                          " set MASTER_ADDR=<job>-0.<service>, MASTER_PORT and WORLD_SIZE=<completions>; without"
                          " them every pod would train by itself into the same run")
    else:
        plan = base.single("no PET_* and no RANK")
    return plan


@dataclass(frozen=True)
class _Base:
    """What all modes share."""

    config: Config
    environ: Mapping[str, str]
    nproc: int
    changes: dict[str, str]
    notes: list[str]
    warnings: list[str]

    def single(self, why: str) -> LaunchPlan:
        # As in elastic mode, and because a restart in place is a new round too.
        self.changes["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.environ.get("MASTER_ADDR") and not self.environ.get("PET_STANDALONE"):
            self.warnings.append("MASTER_ADDR is set and RANK is not: it is left out of account")
        return self._plan("single", why, (1, 1), self._max_restarts(self.config.launch.max_restarts))

    def elastic(self, backend: str, nodes: tuple[int, int]) -> LaunchPlan:
        environ = self.environ
        endpoint = environ.get("PET_RDZV_ENDPOINT", "")
        if not endpoint:
            raise ConfigError(f"PET_RDZV_BACKEND={backend} without PET_RDZV_ENDPOINT: set it to the HOST:PORT"
                              " where the pods meet, as in my-job-worker-0:23456")
        # The v1 operator writes a range in elastic mode, always; a TrainJob has a number beside its master.
        if ":" in environ.get("PET_NNODES", "") and environ.get("PET_MASTER_ADDR"):
            raise ConfigError(f"elasticPolicy together with a Master replica (PET_MASTER_ADDR="
                              f"{environ['PET_MASTER_ADDR']}): PET_NNODES={environ['PET_NNODES']} counts the Workers"
                              " only, so the Master is one node too many; remove the Master from the PyTorchJob")
        conf = _rdzv_conf(environ.get("PET_RDZV_CONF", ""))
        if backend == "c10d":
            join = {"join_timeout": str(max(1, round(self.config.launch.rendezvous_timeout_seconds)))}
            conf = {**_QUICK_CONF, **join, **conf}
        if backend == "c10d" and "is_host" not in conf and (name := _own_name(environ)):
            host = endpoint.rpartition(":")[0] or endpoint
            # TrainJob's host is <pod>.<service>. Otherwise torchrun's own comparison by address stays.
            if host == name or host.startswith(f"{name}."):
                conf["is_host"] = "true"
                self.notes.append(f"this pod ({name}) hosts the rendezvous")
        # torch 2.13: a node that joins a later round never learns MASTER_ADDR if the store is shared.
        self.changes["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return self._plan("elastic", f"PET_RDZV_BACKEND={backend}", nodes,
                          self._max_restarts(self.config.launch.max_restarts),
                          rdzv_backend=backend, rdzv_endpoint=endpoint, rdzv_conf=conf,
                          rdzv_id=environ.get("PET_RDZV_ID") or self.config.run.name)

    def static_from_pet(self, nodes: tuple[int, int]) -> LaunchPlan:
        environ = self.environ
        if nodes[0] != nodes[1]:
            raise ConfigError(f"PET_NNODES={environ['PET_NNODES']} is a range, which needs PET_RDZV_BACKEND=c10d"
                              " and PET_RDZV_ENDPOINT; or set one number")
        missing = [name for name in ("PET_MASTER_ADDR", "PET_NODE_RANK") if not environ.get(name)]
        if missing and nodes[1] > 1:
            raise ConfigError(f"PET_NNODES={nodes[1]} without {' and '.join(missing)}: set them, or for elastic pods"
                              " PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT")
        return self._static("PET_NNODES, PET_MASTER_ADDR, PET_NODE_RANK", nodes[1],
                            rank_name="PET_NODE_RANK", addr=environ.get("PET_MASTER_ADDR") or "127.0.0.1",
                            port_name="PET_MASTER_PORT")

    def static_from_plain(self) -> LaunchPlan:
        """MASTER_ADDR, RANK and WORLD_SIZE without PET_*: Volcano's pytorch plug-in, or a manifest by hand.

        They count *pods*: Volcano gives every pod one RANK and sets WORLD_SIZE to the number of
        pods. So RANK is the node rank, and each pod starts as many ranks as it resolves for itself.
        In an Indexed Job, Kubernetes itself numbers the pods: JOB_COMPLETION_INDEX stands for RANK.
        """
        environ = self.environ
        rank_name = "RANK" if environ.get("RANK") or not environ.get("JOB_COMPLETION_INDEX") else "JOB_COMPLETION_INDEX"
        names = ("MASTER_ADDR", rank_name, "WORLD_SIZE")
        missing = [name for name in names if not environ.get(name)]
        if missing:
            there = [name for name in names if environ.get(name)]
            raise ConfigError(f"{' and '.join(there)} set, {' and '.join(missing)} not: set all three to run"
                              " over several pods, or none to run on this machine alone")
        self.notes.append(f"{rank_name} and WORLD_SIZE are taken to count pods")
        return self._static(", ".join(names), _integer(environ, "WORLD_SIZE", least=1), rank_name=rank_name,
                            addr=environ["MASTER_ADDR"], port_name="MASTER_PORT")

    def _static(self, why: str, nodes: int, *, rank_name: str, addr: str, port_name: str) -> LaunchPlan:
        environ = self.environ
        rank = _integer(environ, rank_name, least=0) if environ.get(rank_name) else 0
        if rank >= nodes:
            raise ConfigError(f"{rank_name}={rank} with {nodes} node{'s' if nodes > 1 else ''}:"
                              f" must be less than {nodes}")
        port = _integer(environ, port_name, least=1) if environ.get(port_name) else _DEFAULT_PORT
        default_restarts = self.config.launch.max_restarts
        if nodes > 1:
            # A replaced pod counts its restarts from 0 and never meets survivors that count on.
            default_restarts = 0
            self.notes.append("static with several pods: no restart in place, all pods restart together"
                              " (launch.max_restarts is for elastic and single)")
        return self._plan("static", why, (nodes, nodes), self._max_restarts(default_restarts),
                          master_addr=addr, master_port=port, node_rank=rank)

    def _max_restarts(self, default: int) -> int:
        return _integer(self.environ, "PET_MAX_RESTARTS", least=0) if self.environ.get("PET_MAX_RESTARTS") else default

    def _plan(self, mode: Mode, why: str, nodes: tuple[int, int], max_restarts: int, *, rdzv_backend: str = "",
              rdzv_endpoint: str = "", rdzv_id: str = "", rdzv_conf: Mapping[str, str] | None = None,
              master_addr: str = "", master_port: int = 0, node_rank: int = 0) -> LaunchPlan:
        return LaunchPlan(
            mode=mode, why=why, nodes_min=nodes[0], nodes_max=nodes[1], nproc=self.nproc, max_restarts=max_restarts,
            rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, rdzv_conf=rdzv_conf or {},
            master_addr=master_addr, master_port=master_port, node_rank=node_rank,
            environment=dict(sorted(self.changes.items())),
            removed=tuple(name for name in _HANDLED if name in self.environ),
            notes=tuple(self.notes), warnings=tuple(self.warnings),
        )


def _nproc(config: Config, resources: Resources, environ: Mapping[str, str], notes: list[str],
           warnings: list[str]) -> int:
    """Ranks of this pod.

    A number in PET_NPROC_PER_NODE decides. Its `auto`, which the operator writes when the manifest
    says nothing, leaves the choice to launch.nproc_per_node. Then `auto` is one rank per GPU, without
    GPUs one rank that uses all CPUs; `gpu` is one per GPU; `cpu` is one per CPU of the cgroup.
    """
    pet = environ.get("PET_NPROC_PER_NODE", "")
    text, key = (pet, "PET_NPROC_PER_NODE") if pet not in ("", "auto") else (
        config.launch.nproc_per_node, "launch.nproc_per_node")
    match text:
        case "auto" if resources.gpus:
            nproc = resources.gpus
            notes.append(f"{nproc} {'rank' if nproc == 1 else 'ranks'} here: one per GPU")
        case "auto":
            nproc = 1
            notes.append("1 rank here: no GPU (launch.nproc_per_node=cpu starts one per CPU)")
        case "cpu":
            nproc = resources.cpus
            notes.append(f"{nproc} {'rank' if nproc == 1 else 'ranks'} here: one per CPU")
        case "gpu":
            nproc = resources.gpus
            if not nproc:
                raise ConfigError(f"{key} = 'gpu': this pod has none ({resources.found[-1]}); ask for nvidia.com/gpu"
                                  " in the manifest, or set auto, cpu or a number")
        case _ if text.isdecimal() and int(text) >= 1:
            nproc = int(text)
        case _:
            raise ConfigError(f"{key} = {text!r}: must be a number of at least 1, auto, cpu or gpu")
    if 0 < nproc < resources.gpus:
        warnings.append(f"{resources.gpus - nproc} of {resources.gpus} GPUs stay idle: {key} = {text}")
    elif 0 < resources.gpus < nproc:
        warnings.append(f"{nproc} ranks share {resources.gpus} GPU(s): {key} = {text}")
    return nproc


def _shutdown_timeout(config: Config) -> int:
    budget = config.launch.stop_budget_seconds
    return max(1, int(budget - min(STOP_MARGIN_SECONDS, budget / 2)))


def _is_standalone(environ: Mapping[str, str]) -> bool:
    # The v1 operator writes the empty string for `standalone: true`; torchrun can't read that.
    return environ.get("PET_STANDALONE", "0") != "0"


def _nodes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    text = environ.get("PET_NNODES", "")
    if not text:
        return None
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(f"PET_NNODES={text}: must be a number of pods or MIN:MAX, at least 1")
    return int(low), int(high or low)


def _integer(environ: Mapping[str, str], name: str, *, least: int) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < least:
        # Kubernetes gives every pod tcp://... in NAME_PORT for a Service called `name`.
        raise ConfigError(f"{name}={text}: must be a whole number of at least {least}")
    return int(text)


def _rdzv_conf(text: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"PET_RDZV_CONF={text}: {pair!r} is not of the form KEY=VALUE")
        conf[key.strip()] = value.strip()
    return conf


def _own_name(environ: Mapping[str, str]) -> str:
    return environ.get("POD_NAME") or environ.get("HOSTNAME", "")
