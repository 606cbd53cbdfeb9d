"""A bare S3 client: memory to objects and back by http.client and presigned addresses, in four threads.

    python -m bench.checkpoint.client DESCRIPTOR SIZE URL NAME

On each line of its standard input (`put`, `get`, `warm`) it does that and answers with a line.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from trainer.checkpoint.wire import SharedMemory

_PART = 32 << 20
_THREADS = 4
_BLOCK = 1 << 20


def main(descriptor: int, size: int, url: str, name: str) -> None:
    endpoint = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", endpoint_url=endpoint.geturl(), region_name="us-east-1",
                      config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"))
    memory = SharedMemory(descriptor, size)
    local = threading.local()

    def connection() -> http.client.HTTPConnection:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(endpoint.netloc)
        found: http.client.HTTPConnection = local.connection
        return found

    def move(job: tuple[str, int]) -> None:
        method, begin = job
        view = memory.view[begin : begin + _PART]
        signed = s3.generate_presigned_url(f"{method.lower()}_object", ExpiresIn=3600, Params={
            "Bucket": bucket, "Key": f"{prefix}/{name}-{begin}"})
        wire = connection()
        wire.putrequest(method, signed.removeprefix(f"{endpoint.scheme}://{endpoint.netloc}"))
        wire.putheader("Content-Length", str(len(view) if method == "PUT" else 0))
        wire.endheaders()
        if method == "PUT":
            for start in range(0, len(view), _BLOCK):
                wire.send(view[start : start + _BLOCK])
        answer = wire.getresponse()
        assert answer.status == 200, (answer.status, answer.read())
        if method == "PUT":
            answer.read()
            return
        done = 0
        while done < len(view):
            done += answer.readinto(view[done : done + _BLOCK])
        answer.read()

    with ThreadPoolExecutor(_THREADS) as pool:
        for line in sys.stdin:
            if line != "warm\n":
                list(pool.map(move, [(line.strip().upper(), begin) for begin in range(0, size, _PART)]))
            print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
