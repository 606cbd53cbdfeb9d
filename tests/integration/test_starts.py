"""The worker starts under every launcher that people have, and under none."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, contents, finish, newest
from tests.servers import free_ports
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_plain_torchrun_and_the_old_launcher_train_the_same_and_one_process_needs_none(
        make_file_job: Callable[..., Job], file_store: ObjectStore) -> None:
    port = str(free_ports(1)[0])
    starts = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        "launch": ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", port, "-m"],
        "alone": ["-m"],
    }
    for name, words in starts.items():
        job = make_file_job(name=name, settings={"train.max_steps": 3})
        ended = finish(job.start([sys.executable, *words, "trainer.ddp.worker", str(job.config())]))
        assert ended.code == 0, ended.text
        stated, = ended.events("training")
        assert stated["ranks"] == (1 if name == "alone" else 2)
    assert contents(file_store, newest(file_store, "torchrun")) == contents(file_store, newest(file_store, "launch"))
