"""The plain script that people write: DistributedDataParallel, torch.save to S3 every 20 steps, resume from there.

Started by torchrun. BENCH_URL is s3://bucket/key, BENCH_TIMEOUT the process group's timeout in seconds.
"""

from __future__ import annotations

import io
import os
from datetime import timedelta

import boto3
import torch
import torch.distributed as dist
from botocore.exceptions import ClientError
from torch.nn.parallel import DistributedDataParallel

from bench.recovery.workload import BATCH, SAVE_EVERY, Rows, build_model, loss


def main() -> None:
    timeout = os.environ.get("BENCH_TIMEOUT")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)) if timeout else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bucket, _, key = os.environ["BENCH_URL"].removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", endpoint_url=os.environ["BENCH_ENDPOINT"], region_name="us-east-1")
    model = build_model(None)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    try:
        state = torch.load(io.BytesIO(s3.get_object(Bucket=bucket, Key=key)["Body"].read()))
    except ClientError:
        pass
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = DistributedDataParallel(model)
    rows = Rows()
    while True:
        first = (step * world_size + rank) * BATCH
        total, count, _ = loss(wrapped, torch.stack([rows[index % len(rows)] for index in range(first, first + BATCH)]))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, buffer)
            s3.put_object(Bucket=bucket, Key=key, Body=buffer.getvalue())


if __name__ == "__main__":
    main()
