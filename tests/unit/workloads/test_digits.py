import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from tests.unit.workloads import support
from trainer.config import Config
from trainer.workloads import digits

CONFIG = support.settings("digits")
TRAIN, VALIDATION = (digits.build_dataset(CONFIG, split) for split in ("train", "validation"))


def test_a_fifth_of_every_class_is_held_out_and_no_image_twice() -> None:
    held_out = torch.tensor(VALIDATION.labels).bincount()
    both = held_out + torch.tensor(TRAIN.labels).bincount()
    assert (len(TRAIN), len(VALIDATION)) == (1442, 355)
    assert held_out.tolist() == (both // 5).tolist()
    assert int(both.sum()) == 1797


def test_an_image_is_one_channel_from_zero_to_one() -> None:
    image, label = TRAIN[0]
    assert image.shape == (1, 8, 8)
    assert (float(TRAIN.images.min()), float(TRAIN.images.max())) == (0.0, 1.0)
    assert label in range(10)


def test_the_default_settings_of_the_tree_build_the_same_model_as_the_file() -> None:
    shapes = [[p.shape for p in digits.build_model(config).parameters()] for config in (CONFIG, Config())]
    assert shapes[0] == shapes[1]


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="chanels"):
        digits.build_model(support.settings("digits", ("workload.options.chanels", "3")))


@settings(max_examples=25, deadline=None)
@given(chosen=st.lists(st.integers(0, len(TRAIN) - 1), min_size=1, max_size=40),
       cuts=st.lists(st.integers(0, 1000), max_size=5))
def test_the_loss_of_a_batch_is_the_sum_over_any_parts_of_it(chosen: list[int], cuts: list[int]) -> None:
    torch.manual_seed(0)
    model = digits.build_model(CONFIG).eval()  # in training, BatchNorm looks at the whole batch
    support.assert_adds_up(model, digits.loss, default_collate, [TRAIN[i] for i in chosen], cuts)


def test_a_batch_of_one_image_trains() -> None:
    model = digits.build_model(CONFIG).train()
    total, count, _ = digits.loss(model, default_collate([TRAIN[0]]))
    total.backward()
    assert count == 1
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_two_epochs_of_a_plain_loop_classify_most_held_out_images() -> None:
    torch.manual_seed(0)
    config = support.settings("digits", ("train.epochs", "2"))
    model = digits.build_model(config)
    support.train(model, digits.loss, default_collate, TRAIN, config)
    assert support.means(model, digits.loss, default_collate, VALIDATION)["accuracy"] > 0.9
