"""From the gradient to new weights: measured, clipped, left out if it is not finite."""

from __future__ import annotations

import math

import torch

from trainer.ddp.ema import Average

_LOOK_EVERY = 16
"""Steps between two looks at a count that lies on the device."""


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a gradient with NaN or Inf in it."""


class Update:
    """One optimizer step on the gradients that lie in the parameters; zeroes them after it.

    The gradients are those of all ranks together when they come here, so every rank sees the same
    norm and leaves the same steps out: no collective is needed for that. Where the optimizer's
    kernel can leave a step out by itself (fused ones), the host does not wait for the device.

    Args:
        clip: largest global gradient norm; 0: no clipping.
        limit: steps in a row that may be left out.
        scaler: of the loss, for fp16; disabled otherwise.
        average: of the weights; follows every step that is taken.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, clip: float = 0.0, limit: int = 0,
                 scaler: torch.amp.GradScaler | None = None, average: Average | None = None) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer, self._clip, self._limit = optimizer, clip, limit
        self._alike = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self.scaler, self.average = scaler or torch.amp.GradScaler(enabled=False), average
        self._by_kernel = (getattr(optimizer, "_step_supports_amp_scaling", False) and average is None
                           and not self.scaler.is_enabled() and self._parameters[0].device.type != "cpu")
        self.skipped = 0
        """Steps left out since the start of this process, as far as the host knows."""
        self._bad = [torch.zeros((), dtype=torch.int32, device=self._parameters[0].device) for _ in range(2)]
        self._row, self._calls = 0, 0

    def __call__(self) -> torch.Tensor:
        """Take the step. Returns the global gradient norm before clipping. Raises NotFiniteError."""
        self.scaler.unscale_(self._optimizer)
        norm = self._norm()
        if self._clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        if self._by_kernel:
            bad = ~torch.isfinite(norm)
            self._optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # as GradScaler hands it over
            self._optimizer.step()
            self._count(bad)
        else:
            self._step(taken=math.isfinite(norm))
        self._optimizer.zero_grad(set_to_none=True)
        if self._row > self._limit:
            raise NotFiniteError(
                f"the gradient was NaN or infinite in {self._row} step{'s' if self._row > 1 else ''} in a row, and"
                f" train.non_finite_limit = {self._limit}: lower optimizer.lr, clip (train.clip_norm), or look for"
                " a division by zero in the model or the data")
        return norm

    def _norm(self) -> torch.Tensor:
        """The global 2-norm. Of one kind of tensors at half the cost of torch's own, which sorts them by kind first."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients or not self._alike:
            return torch.nn.utils.get_total_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore[no-any-return]

    def _step(self, *, taken: bool) -> None:
        # An overflow is how the scaler finds its scale: no fault, while there is scale left to take away.
        expected = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if taken or self.scaler.is_enabled():
            self.scaler.step(self._optimizer)  # leaves the step out by itself, for what unscale_ has found
            self.scaler.update()
        if taken and self.average:
            self.average.follow()
        self.skipped += not taken
        self._row = 0 if taken or expected else self._row + 1

    def _count(self, bad: torch.Tensor) -> None:
        """Count on the device, and look at the counts now and then."""
        skipped, row = self._bad
        skipped += bad
        row.add_(1).mul_(bad)
        self._calls += 1
        if self._calls % _LOOK_EVERY == 0:
            self.skipped, self._row = skipped.item(), row.item()  # type: ignore[assignment]  # whole numbers
