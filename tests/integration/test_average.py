"""An average of the weights that begins, and ends, in the middle of a run."""

from __future__ import annotations

import pytest
import torch

from tests.integration.jobs import Job, contents
from tests.integration.ranks import Ranks, newest_of, store_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def tensors(job: Job, prefix: str) -> dict[str, torch.Tensor]:
    saved = contents(store_of(job), newest_of(job))
    return {name.removeprefix(prefix): torch.frombuffer(bytearray(value), dtype=torch.float32)
            for name, value in saved.items() if name.startswith(prefix)}


def test_it_begins_from_the_weights_of_the_checkpoint_and_may_be_left_out_again(ranks: Ranks) -> None:
    job = ranks.job("average", schedule__decay="constant", train__evaluate_every_epochs=0)
    assert ranks.run(job, 2, train__max_steps=6).code == 0
    before = tensors(job, "model.")

    begun = ranks.run(job, 2, train__max_steps=7, train__ema_decay=0.75)
    assert begun.code == 0, begun.text
    line, = begun.events("not in the checkpoint, begins from the weights as they are")
    assert line["state"] == ["average"]
    after, averages = tensors(job, "model."), tensors(job, "state.average.")
    assert averages.keys() == after.keys()
    for name, average in averages.items():
        torch.testing.assert_close(average, 0.75 * before[name] + 0.25 * after[name])
        assert not torch.equal(before[name], after[name])

    on = ranks.run(job, 2, train__max_steps=8, train__ema_decay=0.75)
    assert on.code == 0, on.text
    assert on.events(line["event"]) == []
    newest = tensors(job, "model.")
    for name, average in tensors(job, "state.average.").items():
        torch.testing.assert_close(average, 0.75 * averages[name] + 0.25 * newest[name])

    ended = ranks.run(job, 2, train__max_steps=9)
    assert ended.code == 0, ended.text
    assert ended.events("in the checkpoint and not kept any more by these settings")[0]["state"] == ["average"]
    assert tensors(job, "state.average.") == {}
    assert newest_of(job).step == 9
