import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.workloads import support
from trainer.workloads import ragged

CONFIG = support.settings("ragged")
TRAIN, VALIDATION = (ragged.build_dataset(CONFIG, split) for split in ("train", "validation"))
EMPTY = [i for i in range(len(TRAIN)) if len(TRAIN[i][0]) == 0]


def model() -> nn.Module:
    torch.manual_seed(0)
    return ragged.build_model(CONFIG)


def loop_over_items(network: nn.Module, batch: ragged.Batch) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    """The same as `ragged.loss`, one item at a time, as one would first write it."""
    total = torch.zeros(())
    error = torch.zeros(())
    rows = batch.rows.split(batch.sizes.tolist())
    for item, target in zip(rows, batch.targets, strict=True):
        prediction = network.score(item).max() if len(item) else network.score(torch.zeros(1, 10)).sum() * 0
        total = total + (prediction - target) ** 2
        error = error + (prediction.detach() - target).abs()
    return total, len(rows), {"absolute_error": error, "empty": torch.tensor(sum(len(item) == 0 for item in rows))}


def test_every_item_is_in_one_split() -> None:
    assert (len(TRAIN), len(VALIDATION)) == (900, 100)
    assert sorted(TRAIN.items + VALIDATION.items) == list(range(1000))


def test_sizes_are_multiples_of_eleven_up_to_99_and_zero_happens() -> None:
    sizes = {len(TRAIN[i][0]) for i in range(len(TRAIN))}
    assert sizes == {0, 11, 22, 33, 44, 55, 66, 77, 88, 99}
    assert 60 <= len(EMPTY) <= 120


def test_values_are_the_target_plus_noise_and_the_same_every_time() -> None:
    index = next(i for i in range(500, 900) if len(TRAIN[i][0]) == 99)
    rows, target = TRAIN[index]
    assert rows.shape == (99, 10)
    assert rows.dtype == torch.float32
    assert target == float(TRAIN.items[index])
    assert abs(float(rows.mean()) - target) < 0.2
    assert 0.8 < float(rows.std()) < 1.2
    assert torch.equal(rows, ragged.build_dataset(CONFIG, "train")[index][0])


def test_collate_concatenates_the_rows_and_keeps_the_sizes() -> None:
    samples = [TRAIN[i] for i in (0, EMPTY[0], 500)]
    batch = ragged.collate(samples)
    assert batch.sizes.tolist() == [len(rows) for rows, _ in samples]
    assert torch.equal(batch.rows, torch.cat([rows for rows, _ in samples]))
    assert batch.targets.tolist() == [target for _, target in samples]


@settings(max_examples=50, deadline=None)
@given(chosen=st.lists(st.one_of(st.integers(0, len(TRAIN) - 1), st.sampled_from(EMPTY)), min_size=1, max_size=12),
       negative=st.booleans())
def test_the_model_equals_a_loop_over_the_items(chosen: list[int], negative: bool) -> None:
    network = model()
    if negative:  # scores below 0: the 0 of empty items must not win against them
        nn.init.constant_(network.score.weight, -0.1)
    batch = ragged.collate([TRAIN[i] for i in chosen])
    expected = support.measure(network, loop_over_items, [batch])
    found = support.measure(network, ragged.loss, [batch])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@settings(max_examples=50, deadline=None)
@given(chosen=st.lists(st.one_of(st.integers(0, len(TRAIN) - 1), st.sampled_from(EMPTY)), min_size=1, max_size=12),
       cuts=st.lists(st.integers(0, 1000), max_size=5))
def test_the_loss_of_a_batch_is_the_sum_over_any_parts_of_it(chosen: list[int], cuts: list[int]) -> None:
    support.assert_adds_up(model(), ragged.loss, ragged.collate, [TRAIN[i] for i in chosen], cuts)


def test_a_batch_without_any_row_gives_zero_gradients_not_none() -> None:
    network = model()
    samples = [TRAIN[i] for i in EMPTY[:4]]
    total, count, metrics = ragged.loss(network, ragged.collate(samples))
    total.backward()
    assert count == 4
    assert float(metrics["empty"]) == 4
    assert total.item() == sum(target**2 for _, target in samples)
    assert [p.grad.abs().max().item() for p in network.parameters()] == [0.0, 0.0]


def test_data_parallel_steps_over_a_batch_without_any_row() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = nn.parallel.DistributedDataParallel(model())
        for chosen in (EMPTY[:4], [0, 500], EMPTY[:4]):  # a reduction left open by one step fails the next
            network.zero_grad()
            ragged.loss(network, ragged.collate([TRAIN[i] for i in chosen]))[0].backward()
            assert all(p.grad is not None for p in network.parameters())
    finally:
        dist.destroy_process_group()


def test_the_error_of_a_plain_loop_falls() -> None:
    config = support.settings("ragged", ("train.epochs", "1"))
    network = model()
    before = support.means(network, ragged.loss, ragged.collate, VALIDATION)["loss"]
    support.train(network, ragged.loss, ragged.collate, TRAIN, config)
    assert support.means(network, ragged.loss, ragged.collate, VALIDATION)["loss"] < 0.9 * before
