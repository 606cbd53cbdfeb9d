"""Ranks of one machine that believe to be in several pods. Run under torchrun instead of `trainer.ddp.worker`.

RATCHET_TEST_PODS = "0,0,1" puts ranks 0 and 1 into one pod and rank 2 into another: each pod has an
uploader of its own, and what pods exchange goes over the network.
"""

from __future__ import annotations

import os
import sys

from trainer.ddp.worker import main

pods = os.environ["RATCHET_TEST_PODS"].split(",")
rank = int(os.environ["RANK"])
os.environ["GROUP_RANK"] = pods[rank]
os.environ["LOCAL_RANK"] = str(pods[:rank].count(pods[rank]))
os._exit(main(sys.argv[1:]))
