"""Names that can't be right are refused before any request: there is no server in these tests."""

from __future__ import annotations

import socket

import pytest

from tests.servers import Credentials
from trainer.config.tree import Store
from trainer.store import StoreRefused, open_store


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request was made")

    for name, value in Credentials().environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("bucket", ["", "ab", "a" * 64, "Upper", "under_score", "-dash", "dash-", "dot.", ".dot",
                                    "two..dots", "10.0.0.1", "sp ace", "bucket?x", "büro", "arn:aws:s3"])
def test_a_bad_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(StoreRefused, match=r"^store\.url = 's3://.* is not a bucket name .*write s3://bucket/prefix$"):
        open_store(Store(url=f"s3://{bucket}/prefix", endpoint="http://127.0.0.1:1"))


@pytest.mark.parametrize("bucket", ["abc", "a-b.c", "123", "a" * 63, "1.2.3.4.5"])
def test_a_good_bucket_name_is_accepted(bucket: str) -> None:
    assert open_store(Store(url=f"s3://{bucket}", endpoint="http://127.0.0.1:1")).url == f"s3://{bucket}"


@pytest.mark.parametrize("prefix", ["../up", "a//b", "/a", "a/./b", "a\nb"])
def test_a_prefix_that_can_not_be_a_key_is_refused(prefix: str) -> None:
    with pytest.raises(StoreRefused, match=r"^store\.url = "):
        open_store(Store(url=f"s3://bucket/{prefix}"))


def test_a_slash_at_the_end_of_the_url_changes_nothing() -> None:
    for url in ("s3://bucket/a/b", "s3://bucket/a/b/"):
        assert open_store(Store(url=url, endpoint="http://127.0.0.1:1")).url == "s3://bucket/a/b"


@pytest.mark.parametrize("endpoint", ["localhost:9000", "minio", "ftp://host", "http://", "http://host:port",
                                      "http://host:0", "https:///path", "s3://bucket", "http://[::1"])
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(StoreRefused, match=r"^store\.endpoint = .*must be http://host:port or https://host:port$"):
        open_store(Store(url="s3://bucket/prefix", endpoint=endpoint))


def test_a_bad_endpoint_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(StoreRefused, match=r"localhost:9000.*look at store\.endpoint.*AWS settings"):
        open_store(Store(url="s3://bucket/prefix"))


def test_a_bad_region_is_refused() -> None:
    with pytest.raises(StoreRefused, match=r"mars!.*look at .*store\.region"):
        open_store(Store(url="s3://bucket/prefix", region="mars!"))
