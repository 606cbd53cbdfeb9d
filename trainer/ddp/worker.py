"""One rank from process start to exit.

`ratchet run` starts it under torchrun; it also runs under a plain `torchrun -m trainer.ddp.worker
[CONFIG] [--section.field VALUE ...]`, and alone, without any launcher.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch

from trainer.checkpoint import restore
from trainer.checkpoint.done import Done, write_done
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.state import capture_random, restore_random
from trainer.config import Config, load_for_worker
from trainer.ddp import build, schedule
from trainer.ddp.accumulate import Gradient
from trainer.ddp.best import Best
from trainer.ddp.bucket import padding
from trainer.ddp.data import Source
from trainer.ddp.ending import Ending, guarded
from trainer.ddp.evaluate import evaluate
from trainer.ddp.extras import FullState
from trainer.ddp.heart import Heart
from trainer.ddp.lean import leave_compiler_alone
from trainer.ddp.loop import Training, train
from trainer.ddp.overlap import exposed_seconds
from trainer.ddp.process import Rank, StopRequest, process_group
from trainer.ddp.pulse import Beat, Pulse
from trainer.ddp.report import Reporter
from trainer.ddp.sampler import Step
from trainer.ddp.saves import Saves, link_to_uploader
from trainer.ddp.summed import warn_of_mean
from trainer.ddp.update import Update
from trainer.ddp.wrap import devices_each, pick_device, set_deterministic, settle_buckets, wrap
from trainer.launch.exits import Exit
from trainer.launch.parent import die_with_parent
from trainer.plugins import Tracked, load_plugins
from trainer.store import StoreUnavailable, open_store
from trainer.telemetry import logs
from trainer.telemetry.channel import Sender
from trainer.telemetry.metrics import RankMetrics
from trainer.trackers.feed import Feed
from trainer.trackers.find import find_trackers
from trainer.trackers.history import History

_STORE_SECONDS = 900.0
_FEED_SECONDS = 5.0
"""Trackers get so long to end: a part of the grace period, and of what a restart takes."""
_LAST_FEED_SECONDS = 60.0
"""And so long when the run is complete and nobody waits."""


class Worker:
    """The parts of one rank, in the order in which they come to be."""

    def __init__(self, config: Config, rank: Rank) -> None:
        self.config, self.rank = config, rank
        sender = Sender.from_environment()
        self.metrics = RankMetrics(rank=rank.rank, local_rank=rank.local_rank, world_size=rank.world_size,
                                   sender=sender)
        self.heart = Heart(self.metrics, sender)
        self.plugins = load_plugins(config)
        self.device = pick_device(rank.local_rank, config.parallel.backend, devices_each(config))
        set_deterministic(config.train.deterministic, self.device)
        self.stop = StopRequest()
        self.trackers = find_trackers(config) if rank.rank == 0 else {}
        self.feed = Feed(self.trackers, flush_seconds=config.track.flush_seconds,
                         dropped=partial(self.metrics.add, "tracker_rows_dropped_total"))
        self.training: Training | None = None

    def run(self) -> Ending:
        try:
            ending = self._run()
        except BaseException as error:
            self.feed.finish(f"{type(error).__name__}: {error}", _FEED_SECONDS)
            raise
        self.feed.finish(ending.message, _FEED_SECONDS if ending.message else _LAST_FEED_SECONDS)
        return ending

    def _run(self) -> Ending:
        with process_group(self.rank, self.device, self.config.parallel.timeout_seconds):
            self._build()
            training = self._restore()
            self.stop.install()
            gc.freeze()  # all that is built stays to the end: no use in looking through it again and again
            if train(training):
                return self._finish(training)
            return self._stop(training)

    def _build(self) -> None:
        config, rank = self.config, self.rank
        # Longer than any operation on the store can take: a rank whose store is slow must not lose its peers.
        self.peers = Peers(max(config.parallel.timeout_seconds, _STORE_SECONDS))
        self.train_split, self.validation_split = build.build_datasets(self.plugins, config)
        self.sampler = build.build_sampler(config, self.train_split, rank.rank, rank.world_size)
        self.lengths = build.lengths_of(self.train_split)
        self.model = wrap(build.build_model(self.plugins, config), self.device, config)
        if rank.rank == 0:
            build.warn_of_single_samples(self.model.module, self.sampler)
        self.optimizer = build.build_optimizer(self.plugins, self.model.module, config)
        self.extras = build.build_extras(self.model.module, config, self.device)
        self.reporter = Reporter(self.metrics, rank=rank.rank, log_every=config.train.log_every_steps,
                                 sampler=self.sampler, track=self.feed.log,
                                 exposed=partial(exposed_seconds, self.model))
        source = partial(Source, collate=self.plugins.collate, workers=config.data.workers, seed=config.run.seed,
                         rank=rank.rank, device=self.device, skip=config.data.failing_samples == "skip",
                         failed=self.reporter.failed)
        self.train_source, self.validation_source = source(self.train_split), source(self.validation_split)
        self.gradient = Gradient(
            self.model, self.plugins.loss, build.autocast(config, self.device),
            counted=config.train.loss_mean == "tokens", group=self.peers.group if build.needs_counts(config) else None,
            scaler=self.extras.get("scaler"))
        self.update = Update(self.model.module, self.optimizer, clip=config.train.clip_norm,
                             limit=config.train.non_finite_limit, **self.extras)

    def _restore(self) -> Training:
        config = self.config
        self.metrics.enter("restore")
        self.store = open_store(config.store)
        identity = build.identity(config, len(self.train_split))
        self.best = Best(config.best)
        history = {name: tracker for name, tracker in self.trackers.items() if isinstance(tracker, History)}
        state = FullState(self.model.module, self.optimizer, {
            **self.extras, "best": self.best, "window": self.reporter.window, **history})
        link = link_to_uploader(config, self.rank, self.peers)
        start = restore.begin(self.store, link, config.run.name, self.peers, state, identity)
        if "average" in state.missing:
            self.extras["average"].begin()
        self.reporter.restored(state.missing, state.left_out)
        self.checkpointer = Checkpointer(
            store=self.store, link=link, peers=self.peers, state=state, run=config.run.name, attempt=start.attempt,
            parent=start.parent, identity=identity, config=asdict(config),
            object_bytes=config.checkpoint.object_mb << 20, ledger=config.data.ledger,
            compare_every=config.checkpoint.compare_every, alike=config.checkpoint.if_different == "stop",
            committed=start.committed, adopted=start.ledgers if not start.committed else ())
        self.saves = Saves(config, self.checkpointer, self.best, self.reporter, self.metrics, self.store.url)
        pulse = Pulse(self.peers, log_every=config.train.log_every_steps,
                      steps_per_epoch=self.sampler.steps_per_epoch, stop_wanted=self.stop.wanted,
                      save_wanted=self.saves.wanted, signs=self.checkpointer.signs)
        end = self.sampler.end(epochs=config.train.epochs, max_steps=config.train.max_steps)
        plan = schedule.plan(config, steps_per_epoch=self.sampler.steps_per_epoch, total_steps=self.sampler.number(end))
        training = self.training = Training(
            config=config, model=self.model, gradient=self.gradient, update=self.update,
            rate=schedule.Rate(self.optimizer, plan, schedule.scale(config)), sampler=self.sampler,
            batches=self.train_source.training, pulse=pulse, metrics=self.metrics,
            save=lambda wait: self.saves.save(training.step, training.samples, wait=wait),
            evaluate=self._evaluate, best=self.best, log=self._beat, note=self._note, samples=start.samples,
            end=start.samples if self.best.over else end)
        if (self.rank.world_size > 2 or config.train.compile != "off") and not training.complete:
            step = self.sampler.step(start.samples)
            settle_buckets(self.model, lambda: self.gradient(self.train_source.training([step]), step))
        if start.samples == 0 and self.rank.rank == 0 and config.train.compile == "off" and not training.complete:
            warn_of_mean(self.model.module, self.plugins.loss, build.autocast(config, self.device), self.train_source,
                         self.sampler.step(0))
        if self.rank.rank == 0:
            logs.get_logger().info("training", **build.describe(config, self.sampler, training.rate, plan.warmup,
                                                                self.rank.world_size))
        training.step = start.step
        self.reporter.begin(start.step, start.samples, training.end,
                            f"{self.store.url}/{start.parent}" if start.parent else "")
        self.feed.begin(Tracked(config, start.attempt, start.step))
        start.set_random(config.run.seed, self.rank.rank)
        return training

    def _beat(self, beat: Beat, rate: float, norm: torch.Tensor | None) -> None:
        assert self.training is not None
        self.saves.hear(beat)
        self.reporter.beat(self.training.samples, beat, rate, norm)

    def _note(self, step: Step) -> None:
        if self.checkpointer.ledger:
            self.checkpointer.ledger.note(step.number, step.epoch, step.samples)
        self.reporter.stepped(self.update.skipped, *padding(step.micro_batches, self.lengths))

    def _evaluate(self) -> bool:
        training = self.training
        assert training is not None
        self.metrics.enter("eval")
        random = capture_random()  # an evaluation must not change what the training draws next
        size = self.config.train.micro_batch_size or max(1, self.config.train.global_batch_size // self.rank.world_size)
        self.checkpointer.copied()  # the average takes the weights' place, and that is not what is being saved
        with self.update.average.used() if self.update.average else nullcontext():
            means = evaluate(
                self.model, self.plugins.evaluate,
                self.validation_source.evaluation(world_size=self.rank.world_size, batch_size=size),
                self.peers, build.autocast(self.config, self.device), self.stop.wanted)
        restore_random(random)
        if means is not None:
            self.best.see(training.step, means)
            self.reporter.evaluated(training.step, means)
            if self.best.over and not training.complete:
                training.end = training.samples
                self.reporter.stops_early(training.step, self.best)
        self.metrics.enter("compute")
        return means is not None

    def _stop(self, training: Training) -> Ending:
        """Stop early, with the last step in the store if it takes it."""
        if self.saves.ensure(training.step, training.samples):
            store = "which is saved"
        elif self.checkpointer.last is not None:
            store = f"the last checkpoint is that of step {self.checkpointer.last.step}: {self.saves.problem}"
        else:
            store = f"without any checkpoint: {self.saves.problem}"
        self.metrics.enter("shutdown")
        self.metrics.flush(force=True)
        return Ending(Exit.PREEMPTED, f"stopped at step {training.step}, {store}")

    def _finish(self, training: Training) -> Ending:
        """Make sure that the end is durable, measure it, and leave the mark that the run is complete."""
        if not self.saves.ensure(training.step, training.samples):
            raise StoreUnavailable("the run is complete but its last checkpoint could not be saved:"
                                   f" {self.saves.problem}")
        if self.best.step != training.step and not self._evaluate():
            return self._stop(training)
        if self.rank.rank == 0 and self.plugins.finish:
            self.model.eval()
            if text := self.plugins.finish(self.model.module, self.config):
                logs.get_logger().info("finish", text=text)
        self.metrics.enter("shutdown")
        assert self.checkpointer.last is not None
        done = Done(run=self.config.run.name, epochs=self.config.train.epochs, max_steps=self.config.train.max_steps,
                    step=training.step, samples=training.samples, checkpoint=self.checkpointer.last.folder,
                    evaluation=self.best.means, config=asdict(self.config))
        self.peers.lead(lambda: write_done(self.store, done))
        self.metrics.flush(force=True)
        return Ending(Exit.DONE)


def main(argv: Sequence[str]) -> int:
    """Run this rank. Returns the exit code, also for errors."""
    die_with_parent()
    leave_compiler_alone()
    rank = Rank.from_environment()
    worker: Worker | None = None

    def run() -> Ending:
        nonlocal worker
        # torch.distributed.launch adds the local rank, which LOCAL_RANK tells too.
        config = load_for_worker([word for word in argv if not word.startswith("--local-rank=")])
        logs.configure(config.log, run=config.run.name, rank=rank.rank, local_rank=rank.local_rank,
                       world_size=rank.world_size, pod=os.environ.get("POD_NAME", ""))
        worker = Worker(config, rank)
        return worker.run()

    def where() -> tuple[int, int, int]:
        return rank.rank, rank.local_rank, worker.training.step if worker and worker.training else 0

    return guarded(run, where=where)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # An orderly end could wait: for peers that are gone, in a collective's destructor; for threads of user code.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
