"""The small GPT: it sees no later letter, padding changes nothing, and what it counts are letters."""

from __future__ import annotations

import torch

from tests.unit.workloads.support import measure, settings
from trainer.workloads import charlm

SMALL = (("workload.options.width", "16"), ("workload.options.blocks", "2"), ("workload.options.context", "32"))


def new() -> tuple[torch.nn.Module, charlm.Pieces]:
    torch.manual_seed(0)
    config = settings("charlm", *SMALL)
    return charlm.build_model(config), charlm.build_dataset(config, "train")


def test_the_pieces_are_the_text_and_the_held_out_ones_are_others() -> None:
    config = settings("charlm", *SMALL)
    train, held_out = (charlm.build_dataset(config, split) for split in ("train", "validation"))
    assert len(held_out) == len(train) // 9
    assert train.lengths == [len(train[i]) - 1 for i in range(len(train))]
    assert max(train.lengths) == 32
    assert min(train.lengths) >= 1
    letters = sum(train.lengths) + sum(held_out.lengths) + len(train) + len(held_out)
    assert letters > 400_000
    assert charlm.decode(charlm.encode("def f(x):\n    return é")) == "def f(x):\n    return ?"


def test_a_letter_is_predicted_from_those_before_it_only() -> None:
    model, _ = new()
    codes = torch.randint(0, 90, (2, 32))
    changed = codes.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(codes)[:, :20], model(changed)[:, :20])


def test_losses_counts_and_gradients_of_a_padded_batch_are_the_sums_of_those_of_its_pieces() -> None:
    model, data = new()
    samples = [data[i] for i in (0, 5, 40, 41)] + [data[data.lengths.index(min(data.lengths))]]
    whole, gradients = measure(model, charlm.loss, [charlm.collate(samples)])
    split, parts = measure(model, charlm.loss, [charlm.collate([sample]) for sample in samples])
    assert whole["count"] == sum(len(sample) - 1 for sample in samples)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(parts, gradients, rtol=1e-3, atol=1e-4)


def test_the_sample_is_the_same_for_the_same_weights_and_of_the_length_asked_for() -> None:
    model, _ = new()
    config = settings("charlm", *SMALL, ("workload.options.sample", "40"))
    assert charlm.finish(model, config) == charlm.finish(model, config)
    assert len(charlm.finish(model, config)) == 40
