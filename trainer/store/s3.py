"""S3 and its clones, through boto3's plain client. Not through its transfer manager, which would
pick another engine by machine type and copies every part; objects here are small enough for one PUT.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import errno
import io
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import boto3.session
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, IncompleteReadError
from botocore.parsers import ResponseParserError

from trainer.store import _probe
from trainer.store._keys import check_key
from trainer.store._s3_errors import FAILURES, code_of, is_expired, translate
from trainer.store.base import Buffer, Exists, StoreRefused

if TYPE_CHECKING:
    from trainer.config.tree import Store as StoreSettings

T = TypeVar("T")

_BUCKET = re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_S3_XML = re.compile(rb"<(ListBucketResult|Error)\b")
_S3_XML_OR_500 = re.compile(rb"<(ListBucketResult|Error)\b|500|error|^\s*$", re.IGNORECASE)
_BLOCK = 1 << 20
_SMALL = 64 << 10
_TRICKLE_SECONDS = 30.0
_SLOWEST = 64 << 10
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}


@dataclass(frozen=True)
class Patience:
    """How long a request may take before the store counts as unavailable."""

    attempts: int
    connect_seconds: float
    read_seconds: float


TRAINING = Patience(attempts=10, connect_seconds=5.0, read_seconds=60.0)
"""Rides out some ten seconds of refusals and more of SlowDown; a longer outage is the caller's to wait for."""

PROBING = Patience(attempts=2, connect_seconds=2.0, read_seconds=5.0)
"""A wrong endpoint is told within seconds."""


_jitter = random.SystemRandom()
"""Not the global generator, whose state belongs to the training and its checkpoints."""


class S3Store:
    """An `ObjectStore` in an S3 bucket, below a prefix.

    Thread-safe. boto3 clients do not survive a fork: make a store in the process that uses it.

    Example:
        >>> store = S3Store("models", "digits", endpoint="http://127.0.0.1:8333")
        >>> store.put("run/done.json", b"{}", if_absent=True)  # doctest: +SKIP

    Raises:
        StoreRefused: when the AWS settings of this machine can't be read; no request is made.
    """

    def __init__(self, bucket: str, prefix: str = "", *, endpoint: str = "", region: str = "",
                 path_style: bool = True) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._patience = TRAINING
        self._conditional_puts = True
        try:
            self._server = _Server(endpoint, region, path_style)
            self._client = self._server.connect(self._patience)
        except (BotoCoreError, ValueError) as error:
            raise StoreRefused(f"{self.url}: {error}: look at store.endpoint, store.region and the AWS settings"
                               ) from error

    @classmethod
    def from_settings(cls, settings: StoreSettings) -> S3Store:
        """The bucket and prefix of `store.url`.

        Raises:
            StoreRefused: when the URL or the endpoint can't be right; no request is made.
        """
        bucket, _, prefix = settings.url.removeprefix("s3://").partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise StoreRefused(f"store.url = {settings.url!r}: {bucket!r} is not a bucket name"
                               " (3 to 63 of a-z, 0-9, '-', '.'; not an address): write s3://bucket/prefix")
        if prefix := prefix.rstrip("/"):
            check_key(prefix, f"store.url = {settings.url!r}")
        if settings.endpoint and not _is_http(settings.endpoint):
            raise StoreRefused(f"store.endpoint = {settings.endpoint!r}: must be http://host:port or https://host:port")
        return cls(bucket, prefix, endpoint=settings.endpoint, region=settings.region, path_style=settings.path_style)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def endpoint(self) -> str:
        """URL of the server, for people."""
        return str(self._client.meta.endpoint_url)

    @property
    def conditional_puts(self) -> bool:
        return self._conditional_puts

    @property
    def clock_ahead(self) -> float | None:
        return self._server.clock_ahead

    def put(self, key: str, data: Buffer, *, crc32: int | None = None, if_absent: bool = False) -> None:
        view = memoryview(data).cast("B")
        crc32 = zlib.crc32(view) if crc32 is None else crc32
        # The server compares, so what is stored is what the caller took the checksum of.
        request = {"Bucket": self._bucket, "Key": self._full(key),
                   "ChecksumCRC32": base64.b64encode(crc32.to_bytes(4, "big")).decode()}
        if if_absent and self._conditional_puts:
            try:
                self._call("put", key, lambda s3: s3.put_object(**request, Body=_body(view), IfNoneMatch="*"))
                return
            except StoreRefused as error:
                if code_of(error.__cause__) != "NotImplemented":
                    raise
                self._conditional_puts = False
        if if_absent and any(name == key for name, _ in self.list(key)):
            raise Exists(f"put {self.url}/{key}: there is such an object already")
        self._call("put", key, lambda s3: s3.put_object(**request, Body=_body(view)))

    def get(self, key: str) -> bytearray:
        request = {"Bucket": self._bucket, "Key": self._full(key)}
        return self._call("get", key, lambda s3: _read_whole(s3.get_object(**request)))

    def read(self, key: str, into: memoryview, begin: int = 0) -> int:
        if not into:
            return 0
        request = {"Bucket": self._bucket, "Key": self._full(key), "Range": f"bytes={begin}-{begin + len(into) - 1}"}
        try:
            return self._call("get", key, lambda s3: _read_into(s3.get_object(**request), into))
        except StoreRefused as error:
            if code_of(error.__cause__) == "InvalidRange":  # the object ends before
                return 0
            raise

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        yield from ((key, item["Size"]) for key, item in self._listed(prefix))

    def written(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        yield from ((key, item["LastModified"].timestamp()) for key, item in self._listed(prefix))

    def _listed(self, prefix: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        found = self._call("list", prefix, lambda s3: [
            (item["Key"].removeprefix(self._prefix), item)
            for page in s3.get_paginator("list_objects_v2").paginate(**request) for item in page.get("Contents", ())])
        # AWS lists in key order; S3 Express does not, nor do servers with folders for keys ('a/b' before 'a-b').
        return sorted(found, key=itemgetter(0))

    def delete(self, key: str) -> None:
        request = {"Bucket": self._bucket, "Key": self._full(key)}
        self._call("delete", key, lambda s3: s3.delete_object(**request))

    def probe(self) -> None:
        self._conditional_puts = _probe.exercise(self.impatient())

    def impatient(self) -> S3Store:
        quick = copy.copy(self)
        quick._patience, quick._client = PROBING, self._server.connect(PROBING)
        return quick

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key, self.url)

    def _call(self, operation: str, key: str, request: Callable[[Any], T]) -> T:
        """Make a request, with the retries that botocore leaves to us, and its errors in our words."""
        cause: BaseException | None = None
        renew = False
        for attempt in range(self._patience.attempts):
            if cause is not None:
                time.sleep(_jitter.uniform(0, min(0.05 * 2**attempt, 5.0)))
            try:
                if renew:
                    self._client = self._server.renew(self._patience)
                return request(self._client)
            except _BrokeOff as broke:
                cause = broke.__cause__
            except FAILURES as error:
                cause = error
                renew = is_expired(error) and not renew  # once: a file or a role may hold newer ones by now
                if not renew and code_of(error) not in _CONFLICTS:
                    break
        assert cause is not None
        raise translate(cause, operation, f"{self.url}/{key}", self.endpoint) from cause


@dataclass
class _Server:
    """The one place where clients are made: whatever a setting could change by surprise is pinned here."""

    endpoint: str
    region: str
    path_style: bool
    session: Any = field(default_factory=boto3.session.Session)
    clock_ahead: float | None = None
    """Seconds by which this machine's clock is ahead of the server's, by the date of its newest answer."""

    def connect(self, patience: Patience) -> Any:
        client = self._client(patience, self._style if self.endpoint else "auto")
        if not self.endpoint and not _is_aws(client.meta.endpoint_url):  # AWS_ENDPOINT_URL, or a profile's
            client = self._client(patience, self._style)
        return client

    def renew(self, patience: Patience) -> Any:
        """A client with credentials that are looked up afresh."""
        self.session = boto3.session.Session()
        return self.connect(patience)

    @property
    def _style(self) -> str:
        return "path" if self.path_style else "virtual"

    def _client(self, patience: Patience, style: str) -> Any:
        client = self.session.client(
            "s3",
            endpoint_url=self.endpoint or None,
            region_name=self.region or self.session.region_name or "us-east-1",
            config=ClientConfig(
                connect_timeout=patience.connect_seconds,
                read_timeout=patience.read_seconds,
                retries={"mode": "standard", "total_max_attempts": patience.attempts},
                max_pool_connections=32,
                tcp_keepalive=True,
                # Our own CRC32 goes with every put. Without these two botocore hashes each byte once more, and
                # with SHA-256 unless the signing is off: 0.4 instead of 2 CPU seconds per GiB.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": style, "payload_signing_enabled": False},
            ),
        )
        client.meta.events.register_last("before-parse.s3.ListObjectsV2", _only_listings)
        client.meta.events.register_last("before-parse.s3", self._take_the_time)
        return client

    def _take_the_time(self, response_dict: Mapping[str, Any], **_: Any) -> None:
        with contextlib.suppress(KeyError, ValueError, TypeError):  # no date, or none that is one
            told = parsedate_to_datetime(response_dict["headers"]["date"])
            self.clock_ahead = time.time() - told.timestamp()


class _Body:
    """A view as a file, the only way of bytes into botocore that neither copies them nor needs a `bytes`.

    `read` hands out slices of the view, longer than asked for, which urllib3 passes on to `sendall`.
    Measured on 64 MiB puts (CPU seconds per GiB): 0.26 so, 0.41 in the 16 KiB that urllib3 asks for,
    0.27 for a bytearray, 1.5 for `bytes(view)` and 1.6 for `BytesIO(view)`, which copy.
    A file also makes botocore send `Expect: 100-continue`: a put that is refused sends no body.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        block = self._view[self._position:self._position + max(size, _BLOCK) if size >= 0 else None]
        self._position += len(block)
        return block

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        return self._position


class _BrokeOff(Exception):
    """The body of an answer ended early, which botocore does not retry; the cause says how."""


def _body(view: memoryview) -> bytes | _Body:
    return _Body(view) if len(view) > _SMALL else bytes(view)  # small: not worth the wait for '100 Continue'


def _read_whole(answer: Mapping[str, Any]) -> bytearray:
    """The body of a GetObject answer. One that breaks off is read again from the start: objects are small."""
    data = bytearray(answer["ContentLength"])
    _read_into(answer, memoryview(data))
    return data


def _read_into(answer: Mapping[str, Any], into: memoryview) -> int:
    """The body of a GetObject answer, as far as there is room for it. Returns its length.

    A server that sends a trickle is as good as one that sends nothing: `_SLOWEST` bytes a second are asked for.
    """
    body = answer["Body"]
    size = min(int(answer["ContentLength"]), len(into))
    began, done = time.monotonic(), 0
    try:
        while done < size:
            count = body.readinto(into[done:min(done + _BLOCK, size)])  # by blocks: urllib3 reads into bytes first
            if not count:
                raise IncompleteReadError(actual_bytes=done, expected_bytes=size)
            done += count
            if time.monotonic() - began > _TRICKLE_SECONDS + done / _SLOWEST:
                raise TimeoutError(errno.ETIMEDOUT, f"{done} of {size} bytes in {time.monotonic() - began:.0f} s")
        if size == answer["ContentLength"]:
            body.read()  # nothing is left; this gives the connection back to the pool
        else:
            body.close()
    except FAILURES as error:
        body.close()
        raise _BrokeOff from error
    return size


def _only_listings(response_dict: Mapping[str, Any], **_: Any) -> None:
    """Tell the page of some other server from a listing. botocore sees an empty one in XML of another kind.

    What is no XML at all it has made a 500 of before we see it, to be retried; a real 500 says so in its text.
    """
    status, body = response_dict["status_code"], response_dict["body"]
    if status in {200, 500} and not (_S3_XML if status == 200 else _S3_XML_OR_500).search(body, 0, 2000):
        raise ResponseParserError("the answer is not a listing")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_aws(url: str) -> bool:
    return (urlsplit(url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
