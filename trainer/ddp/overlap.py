"""The part of the gradient exchange that the backward pass does not hide.

DistributedDataParallel times its own first ten steps and then one in a hundred; what it has found is
only read here, so it costs a step nothing.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from trainer.ddp.wrap import Wrapped


def exposed_seconds(model: Wrapped) -> float | None:
    """Seconds from the end of the backward pass to the end of its last all-reduce, in the newest step that was timed.

    None before the first, and without DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    data = model._get_ddp_logging_data()
    exchange, hidden = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if exchange is None or hidden is None:
        return None
    return max(0.0, (int(exchange) - int(hidden)) / 1e9)
