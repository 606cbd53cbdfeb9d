"""Every setting of Ratchet, with its default and its meaning right under it.

The table of settings in the README is generated from this file (`trainer.config.reference`),
so a field without a docstring fails the tests. User code receives the whole tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A mistake of the user that can be told before training: one line, exit code 2."""


@dataclass(frozen=True)
class Run:
    """What this training is called and where its randomness comes from."""

    name: str = "run"
    """Name of the run: its folder under `store.url`. The same name resumes, a new name starts afresh."""

    seed: int = 0
    """Seed of the weights, the sample order, dropout and data augmentation."""


@dataclass(frozen=True)
class Workload:
    """User code, by import string; see `trainer.plugins` for the contracts."""

    module: str = "trainer.workloads.digits"
    """Module that defines `build_model`, `build_dataset`, `loss` and, optionally, the rest below."""

    build_model: str = ""
    """`package.module:attribute` that replaces the module's `build_model`."""

    build_dataset: str = ""
    """`package.module:attribute` that replaces the module's `build_dataset`."""

    loss: str = ""
    """`package.module:attribute` that replaces the module's `loss`."""

    collate: str = ""
    """`package.module:attribute` that replaces the module's `collate` (else torch's default)."""

    build_optimizer: str = ""
    """`package.module:attribute` that replaces the module's `build_optimizer` (else `optimizer.*`)."""

    evaluate: str = ""
    """`package.module:attribute` that replaces the module's `evaluate` (else `loss` on the validation split)."""

    finish: str = ""
    """`package.module:attribute` that replaces the module's `finish` (else nothing is done at the end)."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Free table for the user code (`config.workload.options`); Ratchet does not look inside."""


@dataclass(frozen=True)
class Train:
    """The length of the run and the contents of one step."""

    epochs: int = 1
    """Passes over the training split; every sample exactly once in each."""

    max_steps: int = 0
    """Stop after this many optimizer steps, even within an epoch; 0: no such limit."""

    global_batch_size: int = 64
    """Samples per optimizer step over all ranks. Fixed for a run, whatever the number of ranks."""

    micro_batch_size: int = 0
    """Most samples in one forward pass of one rank; larger shares are accumulated. 0: the whole share."""

    drop_last: bool = False
    """Leave out the last, incomplete global batch of every epoch."""

    loss_mean: Literal["samples", "tokens"] = "samples"
    """What the mean loss of a global batch is over. `tokens`: over all that `loss` counts, tokens or weights."""

    clip_norm: float = 0.0
    """Clip the global gradient norm to this value; 0: no clipping."""

    non_finite_limit: int = 10
    """Steps in a row with NaN or Inf in the gradient: left out on all ranks and counted; one more ends the run."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """`bf16`, `fp16`: autocast for forward and loss; weights and optimizer keep their types. fp16 scales the loss."""

    tf32: bool = False
    """On GPUs, multiply fp32 matrices in TensorFloat-32: faster, 10 bits of mantissa."""

    channels_last: bool = False
    """Keep images and convolutions with the channels last in memory."""

    compile: Literal["off", "static", "dynamic"] = "off"
    """torch.compile the model: `static` makes kernels for every shape of batch it meets, `dynamic` one set for all
    (ragged data). Needs a C++ compiler, or Triton and a C compiler on GPUs."""

    recompute: str = ""
    """Names of layers, by commas, whose activations are computed again in the backward pass: less memory."""

    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights, for the evaluation; 0: none. Common: 0.999."""

    sync_batch_norm: bool = False
    """Convert BatchNorm to SyncBatchNorm: statistics over the micro-batches of all ranks together."""

    evaluate_every_epochs: int = 1
    """Evaluate after every so many epochs, and always at the end; 0: only at the end."""

    evaluate_every_steps: int = 0
    """Evaluate after every so many optimizer steps too; 0: not by steps."""

    log_every_steps: int = 50
    """One log line with loss, learning rate and throughput every so many steps."""

    deterministic: bool = True
    """On GPUs, choose kernels that give the same bits every time, where torch has them; a CPU always does."""


@dataclass(frozen=True)
class Best:
    """Which evaluation is the best, and when to stop for want of a better one."""

    metric: str = ""
    """What the evaluations are judged by: `loss`, or a measure of the workload's own; a save is made at each new
    best. Empty: no judgement."""

    mode: Literal["min", "max"] = "min"
    """Whether less or more of it is better."""

    patience: int = 0
    """End the run after so many evaluations in a row that were no better (early stopping); 0: never."""

    min_delta: float = 0.0
    """For patience: what is better by no more than this counts as no better."""


@dataclass(frozen=True)
class Optimizer:
    """The built-in choice; `workload.build_optimizer` replaces it."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """Which torch optimizer."""

    lr: float = 1e-3
    """Peak learning rate. It never changes because the number of ranks changed."""

    weight_decay: float = 0.0
    """Weight decay (decoupled for adamw, L2 otherwise)."""

    momentum: float = 0.0
    """Momentum, for sgd."""

    fused: bool = False
    """torch's fused kernel: one pass over the parameters; on GPUs, the host need not wait for a non-finite step."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the step."""

    decay: Literal["constant", "cosine", "linear", "step", "inverse_sqrt", "wsd"] = "constant"
    """Shape after the warm-up. `wsd`: stable, then down in the last `decay_share` of the run."""

    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to `optimizer.lr`."""

    warmup_epochs: float = 0.0
    """The warm-up in epochs, instead of `warmup_steps`."""

    warmup_samples: int = 0
    """The warm-up in samples over all ranks, instead of `warmup_steps`."""

    final_ratio: float = 0.0
    """Learning rate of the last step over `optimizer.lr`, for cosine, linear and wsd."""

    step_epochs: float = 30.0
    """For step: epochs between two reductions."""

    step_factor: float = 0.1
    """For step: what each reduction multiplies the learning rate by."""

    decay_share: float = 0.2
    """For wsd: part of the steps after the warm-up in which the learning rate falls, linearly."""

    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `optimizer.lr` by `train.global_batch_size` / `reference_batch`, or by its square root."""

    reference_batch: int = 0
    """For scaling: the global batch size that `optimizer.lr` was chosen for."""


@dataclass(frozen=True)
class Data:
    """How samples reach a rank."""

    workers: int = 0
    """Loader processes per rank; 0 loads in the rank itself."""

    failing_samples: Literal["stop", "skip"] = "stop"
    """What a sample that raises does: end the run, or be left out of its batch, named and counted."""

    bucket_batches: int = 0
    """Sort so many global batches at a time by the dataset's `lengths`, for less padding; 0: no sorting."""

    samples_per_epoch: int = 0
    """Samples of an epoch of an IterableDataset that has no length."""

    ledger: bool = False
    """Write the numbers of all samples trained on into the store with each checkpoint, for `ratchet audit`."""


@dataclass(frozen=True)
class Parallel:
    """How one model is trained by several processes or devices."""

    strategy: Literal["ddp", "single", "dp", "model_split"] = "ddp"
    """`ddp`: a replica per rank. `single`, `dp`: one process, one or all its GPUs. `model_split`: layers shared out."""

    split_devices: int = 2
    """For model_split: devices of each rank; with several ranks, each replica is split."""

    split_at: str = ""
    """For model_split: names of the layers that begin the second, third, ... device; empty: even in bytes."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; auto is nccl on GPUs and gloo elsewhere."""

    timeout_seconds: float = 300.0
    """A collective that waits longer than this fails and names its rank."""

    find_unused_parameters: bool = False
    """For models in which some parameters get no gradient in some steps."""

    bucket_mb: float = 25.0
    """Size of a gradient bucket in MiB."""

    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets: less memory and no copy."""

    static_graph: bool = False
    """For models whose used parameters are the same in every step; allows reentrant checkpointing."""

    compress: Literal["none", "bf16"] = "none"
    """`bf16`, with NCCL only: half as much to exchange; the gradients lose the bits that bf16 does not have."""


@dataclass(frozen=True)
class Store:
    """The object store that holds checkpoints."""

    url: str = "file://ratchet-store"
    """`s3://bucket/prefix` or `file:///folder` (`file://folder` is relative to the working folder)."""

    endpoint: str = ""
    """Endpoint of an S3-compatible server; empty: AWS, or AWS_ENDPOINT_URL."""

    region: str = ""
    """Region; empty: the ordinary AWS chain, else us-east-1."""

    path_style: bool = True
    """With `endpoint`: put the bucket into the path rather than into the host name."""

    connections: int = 8
    """Objects that the uploader of a pod writes at the same time, and connections it keeps for that."""


@dataclass(frozen=True)
class Checkpoint:
    """When to save, and what to do at the start."""

    every_steps: int = 0
    """Save after every so many steps; 0: no step interval."""

    every_seconds: float = 300.0
    """Save when so many seconds have passed since the last save; 0: no time interval."""

    if_busy: Literal["wait", "skip"] = "wait"
    """When a save is due while the one before it is still on its way: `wait` for that, or `skip` this one.
    Both are counted (`ratchet_checkpoint_early_total`)."""

    keep_last: int = 0
    """After a commit, keep so many of the newest checkpoints (never fewer than two), the one that this start went on
    from and those that the next three settings name, and delete the rest of this run's; 0: delete nothing."""

    keep_every_steps: int = 0
    """Keep checkpoints whose step is a multiple of this; 0: none for that."""

    keep_best: int = 0
    """Keep so many with the best `best.metric`, of those that were evaluated at their own step."""

    keep_spaced: bool = False
    """Keep one for every doubling of the age: many young ones, few old ones."""

    compare_every: int = 10
    """Compare a checksum of the whole state over all ranks, at the first save after a start and at every so many-th
    after that; 0: never. It is taken beside the next step, as the copy is."""

    if_different: Literal["stop", "warn"] = "stop"
    """When ranks do not have the same state: `stop` (nothing is committed, code 164, the next start goes on from the
    last checkpoint), or `warn` and save what there is. Both are counted (`ratchet_replica_divergences_total`)."""

    object_mb: int = 32
    """Largest object in MiB; also the unit of reading, checking and repeating."""


@dataclass(frozen=True)
class Launch:
    """How ranks are started and stopped."""

    nproc_per_node: str = "auto"
    """Ranks on this machine when PET_NPROC_PER_NODE does not say: a number, auto, cpu or gpu."""

    max_restarts: int = 100
    """Restarts of the worker group by torchrun when PET_MAX_RESTARTS does not say."""

    max_restarts_without_progress: int = 5
    """So many failures in a row with no new checkpoint between them end the job for good, over all its pods."""

    rendezvous_timeout_seconds: float = 600.0
    """How long to wait for the pod that hosts the rendezvous, and then for enough pods to meet."""

    silent_seconds: float = 10.0
    """A rank that sends no heartbeat and uses no CPU for so long is killed and restarted; 0: never."""

    stall_seconds: float = 120.0
    """After so long without a step (or 5 times the longest so far) all stacks are logged, after twice that the
    ranks are restarted; 0: never."""

    start_seconds: float = 1800.0
    """The same limit for a start, a restore, an evaluation or a save, which have no steps to learn from."""

    kubernetes_events: bool = False
    """Write Events and an annotation of the PyTorchJob when the run starts, goes on, hangs or ends; needs the
    Role of k8s/components/events."""

    warm_start: bool = True
    """Fork ranks from a process that has imported torch already; false: a new interpreter each."""

    stop_budget_seconds: float = 30.0
    """Time from SIGTERM to the end: the same value as terminationGracePeriodSeconds."""


@dataclass(frozen=True)
class Metrics:
    """The HTTP port of the pod: /metrics /healthz /readyz /status."""

    port: int = 9464
    """Port; 0: any free one. A busy port is replaced by a free one with a warning."""

    host: str = ""
    """Address to bind; empty: all addresses in Kubernetes, 127.0.0.1 elsewhere."""


@dataclass(frozen=True)
class Log:
    """Log lines on standard output."""

    format: Literal["auto", "json", "console"] = "auto"
    """`auto` is console on a terminal and JSON elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is shown."""


@dataclass(frozen=True)
class Track:
    """Where the course of training is taken down."""

    to: str = "console"
    """Trackers by commas: `console` (the log), `jsonl` (a history in the store), `tensorboard`, `wandb`, or import
    strings `package.module:attribute`. Empty: none."""

    flush_seconds: float = 15.0
    """How often trackers write what they hold back."""


@dataclass(frozen=True)
class Config:
    """The whole tree, as user code and every part of Ratchet receive it."""

    run: Run = field(default_factory=Run)
    workload: Workload = field(default_factory=Workload)
    train: Train = field(default_factory=Train)
    best: Best = field(default_factory=Best)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    store: Store = field(default_factory=Store)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)
    metrics: Metrics = field(default_factory=Metrics)
    log: Log = field(default_factory=Log)
    track: Track = field(default_factory=Track)


SECTIONS: Mapping[str, type[Any]] = {
    section.name: section.default_factory  # type: ignore[misc]  # the factory of each is its class
    for section in dataclasses.fields(Config)
}
"""Section name -> its dataclass."""

KEYS = tuple(f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls))
"""Every setting as `section.field`, in the order of the tree."""
