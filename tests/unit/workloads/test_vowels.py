import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workloads import support
from trainer.workloads import vowels

CONFIG = support.settings("vowels")
TRAIN, VALIDATION = (vowels.build_dataset(CONFIG, split) for split in ("train", "validation"))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return vowels.build_model(CONFIG).eval()  # dropout would be another one in each part


def test_the_split_is_the_one_of_the_source() -> None:
    assert (len(TRAIN), len(VALIDATION)) == (270, 370)
    assert torch.tensor(TRAIN.speakers).bincount().tolist() == [30] * 9


def test_utterances_have_unequal_lengths_and_are_cut_where_the_source_cuts_them() -> None:
    first, speaker = TRAIN[0]
    assert first.shape == (20, 12)
    assert speaker == 0
    torch.testing.assert_close(first[[0, -1], 0], torch.tensor([1.860936, 1.261441]))
    last, speaker = VALIDATION[369]
    assert last.shape == (11, 12)
    assert speaker == 8
    torch.testing.assert_close(last[[0, -1], [0, -1]], torch.tensor([1.421622, 0.224688]))


def test_collate_pads_to_the_longest_and_keeps_the_lengths() -> None:
    samples = [TRAIN[i] for i in (0, 100, 200)]
    batch = vowels.collate(samples)
    assert batch["lengths"].tolist() == [len(utterance) for utterance, _ in samples]
    assert batch["frames"].shape == (3, int(batch["lengths"].max()), 12)
    for row, (utterance, speaker), label in zip(batch["frames"], samples, batch["speakers"], strict=True):
        assert torch.equal(row[: len(utterance)], utterance)
        assert not row[len(utterance):].any()
        assert label == speaker


@pytest.mark.parametrize("filling", [1.0, -1e30, math.inf, math.nan])
def test_what_stands_in_the_padding_changes_neither_the_loss_nor_the_gradients(filling: float) -> None:
    batch = vowels.collate([TRAIN[i] for i in range(0, 270, 9)])
    padding = torch.arange(batch["frames"].shape[1]) >= batch["lengths"][:, None]
    assert padding.any()
    network = model()
    expected = support.measure(network, vowels.loss, [batch])
    frames = batch["frames"].masked_fill(padding[:, :, None], filling)
    found = support.measure(network, vowels.loss, [{**batch, "frames": frames}])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_more_padding_changes_nothing() -> None:
    batch = vowels.collate([TRAIN[i] for i in range(0, 270, 9)])
    longer = {**batch, "frames": torch.nn.functional.pad(batch["frames"], (0, 0, 0, 13))}
    network = model()
    torch.testing.assert_close(network(longer["frames"], longer["lengths"]), network(batch["frames"], batch["lengths"]))


def test_every_frame_counts() -> None:
    batch = vowels.collate([TRAIN[0], TRAIN[269]])
    frames = batch["frames"].requires_grad_()
    vowels.loss(model(), batch)[0].backward()
    inside = torch.arange(frames.shape[1]) < batch["lengths"][:, None]
    assert torch.equal(frames.grad.abs().sum(2) > 0, inside)


@settings(max_examples=25, deadline=None)
@given(chosen=st.lists(st.integers(0, len(TRAIN) - 1), min_size=1, max_size=40),
       cuts=st.lists(st.integers(0, 1000), max_size=5))
def test_the_loss_of_a_batch_is_the_sum_over_any_parts_of_it(chosen: list[int], cuts: list[int]) -> None:
    support.assert_adds_up(model(), vowels.loss, vowels.collate, [TRAIN[i] for i in chosen], cuts)


def test_eight_epochs_of_a_plain_loop_know_most_speakers() -> None:
    config = support.settings("vowels", ("train.epochs", "8"))
    network = model()
    support.train(network, vowels.loss, vowels.collate, TRAIN, config)
    assert support.means(network, vowels.loss, vowels.collate, VALIDATION)["accuracy"] > 0.9
