"""The update: clipped as torch clips, left out when it is not finite, averaged, with a scaled loss."""

from __future__ import annotations

import pytest
import torch

from trainer.ddp.ema import Average
from trainer.ddp.update import NotFiniteError, Update


def new(**options: object) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Update]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, Update(model, optimizer, **options)  # type: ignore[arg-type]


def backward(model: torch.nn.Module, factor: float = 1.0) -> None:
    model(torch.full((4, 3), factor)).square().sum().backward()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_it_is_the_step_of_the_optimizer_on_the_gradient_that_torch_clips(clip: float) -> None:
    model, _, update = new(clip=clip)
    expected, optimizer, _ = new()
    for factor in (1.0, 3.0):
        backward(model, factor)
        backward(expected, factor)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(update(), norm)
        assert all(p.grad is None for p in model.parameters()), "zeroed once a step"
    assert all(map(torch.equal, weights(model), weights(expected)))


def test_the_norm_is_that_of_all_gradients_also_of_several_kinds() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, dtype=torch.float64)])
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index))
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert torch.equal(Update(model, torch.optim.SGD(model.parameters(), lr=0.1))(), expected)


def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments_and_is_counted() -> None:
    model, optimizer, update = new(clip=1.0, limit=2)
    backward(model)
    update()
    before, moments = weights(model), [dict(state) for state in optimizer.state.values()]
    for _ in range(2):
        backward(model, float("inf"))
        assert not torch.isfinite(update())
    assert all(map(torch.equal, weights(model), before))
    assert [state["step"] for state in optimizer.state.values()] == [state["step"] for state in moments]
    assert update.skipped == 2
    backward(model)
    update()
    backward(model, float("nan"))
    update()
    assert update.skipped == 3, "a good step between: the row begins anew"


def test_one_step_too_many_in_a_row_ends_the_run_with_the_setting_and_what_to_do() -> None:
    model, _, update = new(limit=1)
    backward(model, float("nan"))
    update()
    backward(model, float("nan"))
    with pytest.raises(NotFiniteError, match=r"in 2 steps in a row.*train.non_finite_limit = 1: lower optimizer.lr"):
        update()


def test_the_average_is_that_of_the_formula_and_the_weights_come_back() -> None:
    model, optimizer, _ = new()
    average = Average(model, 0.9)
    update = Update(model, optimizer, average=average, limit=1)
    expected = weights(model)
    for factor in (1.0, 2.0, float("nan"), 3.0):
        backward(model, factor)
        good = torch.isfinite(torch.tensor(factor))
        update()
        if good:
            expected = [0.9 * mean + 0.1 * p.detach() for mean, p in zip(expected, model.parameters(), strict=True)]
    before = weights(model)
    with average.used():
        torch.testing.assert_close(weights(model), expected)
    assert all(map(torch.equal, weights(model), before))


def test_a_scaled_loss_gives_the_step_of_the_plain_one_and_an_overflow_lowers_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, _, update = new(clip=0.5, scaler=scaler)
    expected, _, plain = new(clip=0.5)
    for factor in (1.0, 2.0):
        scaler.scale(model(torch.full((4, 3), factor)).square().sum()).backward()
        backward(expected, factor)
        torch.testing.assert_close(update(), plain())
    torch.testing.assert_close(weights(model), weights(expected))
    before = weights(model)
    scaler.scale(model(torch.full((4, 3), float("inf"))).square().sum()).backward()
    update()
    assert (scaler.get_scale(), update.skipped) == (2.0**9, 1)
    assert all(map(torch.equal, weights(model), before)), "no limit is used up while there is scale to take away"
