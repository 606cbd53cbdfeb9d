"""What the nursery imports before it forks. Only modules that start no thread and touch no GPU."""

from __future__ import annotations

import os
import threading

from trainer.launch.parent import die_with_parent

die_with_parent()  # the agent's death is the nursery's and, through it, every rank's
# torch.cuda.is_available() would otherwise start CUDA's driver, which does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import trainer.checkpoint.restore  # noqa: E402
import trainer.ddp.check  # noqa: E402
import trainer.ddp.worker  # noqa: E402
import trainer.store.s3  # noqa: E402, F401
from trainer.ddp.lean import leave_compiler_alone  # noqa: E402

leave_compiler_alone()

assert threading.active_count() == 1, "a thread would be lost in the fork"
