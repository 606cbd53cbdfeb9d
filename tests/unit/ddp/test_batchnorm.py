"""SyncBatchNorm of CPU ranks: alone it is torch's BatchNorm; over ranks, see the integration tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.checkpoint.peers import Peers
from trainer.ddp.batchnorm import SyncBatchNorm, stand_in, synchronise


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 7), (2, 3, 4, 5)])
def test_alone_it_is_the_batch_norm_of_torch_forward_and_backward(
        options: dict[str, Any], shape: tuple[int, ...], alone: Peers) -> None:
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    plain, ours = (kind(3, **options).double() for _ in range(2))
    model = synchronise(torch.nn.Sequential(ours))
    assert isinstance(model[0], SyncBatchNorm)
    assert list(model.state_dict()) == [f"0.{name}" for name in plain.state_dict()]
    torch.manual_seed(1)
    for _ in range(3):
        a = (100 + torch.randn(shape, dtype=torch.float64)).requires_grad_()
        b = a.detach().clone().requires_grad_()
        weights = torch.randn(shape, dtype=torch.float64)
        for x, module in ((a, plain), (b, model)):
            (module(x) * weights).sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))
    torch.testing.assert_close(model.eval()(b), plain.eval()(a))


def test_one_value_for_a_channel_over_all_ranks_is_refused(alone: Peers) -> None:
    model = synchronise(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="more than one value per channel over all ranks, got 1"):
        model(torch.randn(1, 3))


def test_a_stand_in_is_no_part_of_the_statistics(alone: Peers) -> None:
    model = synchronise(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    with stand_in(True), pytest.raises(ValueError, match="got 0"):
        model(torch.randn(4, 3))
