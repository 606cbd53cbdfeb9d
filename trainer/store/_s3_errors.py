"""What went wrong between us and S3, in one line: operation, object, reason, what to do.

Everything that botocore and urllib3 can raise from a call comes out of here as a `StoreError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError as Urllib3Error

from trainer.store.base import Exists, NotFound, StoreError, StoreRefused, StoreUnavailable

FAILURES = (boto.BotoCoreError, boto.ClientError, ResponseParserError, Urllib3Error, OSError)
"""What a call of the client, or reading its body, may raise."""

_PERMISSIONS: Mapping[str, str] = MappingProxyType({
    "put": "s3:PutObject",
    "get": "s3:GetObject (and s3:ListBucket, without which a missing object reads as forbidden)",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
})

_MISSING = {"NoSuchKey", "NoSuchVersion"}
_FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthorizationHeaderMalformed"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_OTHER_REGION = {"PermanentRedirect", "IllegalLocationConstraintException", "301", "307"}
_OVERLOADED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded",
               "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
_WRONG_BYTES = {"BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest"}


def code_of(error: BaseException | None) -> str:
    """The S3 error code ('NoSuchKey'), or the HTTP status as text when the answer had none; '' for other errors."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def is_expired(error: BaseException) -> bool:
    return code_of(error) in _EXPIRED


def translate(error: BaseException, operation: str, place: str, endpoint: str) -> StoreError:
    """The `StoreError` for an error of the client.

    Args:
        error: one of `FAILURES`.
        operation: put, get, list or delete.
        place: `s3://bucket/key`.
        endpoint: URL of the server.
    """
    what = f"{operation} {place} at {endpoint}"
    if isinstance(error, boto.ClientError):
        return _from_answer(error, operation, what)
    if isinstance(error, ResponseParserError):
        return _not_s3(what, "the answer is not S3's XML")
    if isinstance(error, boto.SSLError):
        return _from_tls(error, what)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return StoreRefused(f"{what}: no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
                            " a profile, or give the pod a role")
    if isinstance(error, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return StoreUnavailable(f"{what}: the source of the credentials does not answer: {_reason(error)}")
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return StoreUnavailable(f"{what}: no answer in time: look at the endpoint, its load and the network policies")
    if isinstance(error, boto.EndpointConnectionError | boto.ProxyConnectionError):
        return StoreUnavailable(f"{what}: can't connect: {_reason(error)}: look at the endpoint and the network")
    if isinstance(error, boto.HTTPClientError | boto.IncompleteReadError | Urllib3Error | OSError):
        return StoreUnavailable(f"{what}: the connection broke: {_reason(error)}")
    return StoreRefused(f"{what}: {_one_line(error)}: look at store.* and the AWS settings")


def _from_answer(error: boto.ClientError, operation: str, what: str) -> StoreError:
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    told = _one_line(error.response.get("Error", {}).get("Message") or "no reason given")
    says = f"{what}: {code}: {told}"
    if error.operation_name.startswith("AssumeRole"):
        return StoreRefused(f"{says}: the role of the pod can't be taken: look at its trust policy")
    if status in {304, 412}:
        return Exists(f"{what}: there is such an object already")
    if code in _MISSING:
        return NotFound(f"{what}: there is no such object")
    if code == "NoSuchBucket":
        return StoreRefused(f"{what}: there is no such bucket: make it, or correct store.url or the endpoint")
    if code in _WRONG_KEY:
        return StoreRefused(f"{says}: look at the access key, the secret and the region")
    if code in _EXPIRED:
        return StoreRefused(f"{says}: renew the credentials")
    if code == "RequestTimeTooSkewed":
        return StoreUnavailable(f"{says}: the node clock is wrong by many minutes: synchronise it (NTP)")
    if code in _OTHER_REGION:
        return StoreRefused(f"{says}: the bucket is in another region: set store.region")
    if code in _WRONG_BYTES:
        return StoreError(f"{says}: the bytes do not match their CRC32: they changed in memory or on the way;"
                          " nothing was written")
    if code in _OVERLOADED or status in {429, 500, 502, 503, 504}:
        return StoreUnavailable(f"{says}: still so after all retries")
    if code in _FORBIDDEN:
        return StoreRefused(f"{says}: allow {_PERMISSIONS[operation]}")
    if code in {"", str(status)}:  # S3 names its errors; a bare status is the page of some other server
        return _not_s3(what, f"HTTP status {status} without an S3 error")
    return StoreRefused(says)


def _from_tls(error: boto.SSLError, what: str) -> StoreError:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = re.search(r"certificate verify failed: ([^(\]]+)", text)
        return StoreRefused(f"{what}: the certificate does not verify{': ' + reason[1].strip() if reason else ''}:"
                            " set AWS_CA_BUNDLE to the authority's file, or correct the endpoint's name")
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
        return StoreRefused(f"{what}: the server does not speak TLS: write http:// in the endpoint")
    return StoreUnavailable(f"{what}: TLS failed: {_one_line(error)}")


def _not_s3(what: str, found: str) -> StoreRefused:
    return StoreRefused(f"{what}: the endpoint answers but is not S3 ({found}): correct store.endpoint")


def _reason(error: BaseException) -> str:
    """What the operating system said, from under the layers of wrapping."""
    seen: BaseException | None = error
    found = ""
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            found = seen.strerror
        seen = seen.__cause__ or seen.__context__
    return found or _one_line(error)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
