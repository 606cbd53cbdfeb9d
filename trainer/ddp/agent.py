"""torchrun, as a child of the supervisor: the same arguments, and it ends when its parent does."""

from __future__ import annotations

from torch.distributed.run import main

from trainer.ddp.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
