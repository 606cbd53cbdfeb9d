"""What S3 and the network can do to us, on a real server behind a proxy that misbehaves on request."""

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers import Credentials, FaultProxy, SeaweedFS, free_ports, plain_web_server
from trainer.config.tree import Store
from trainer.store import Exists, NotFound, StoreError, StoreRefused, StoreUnavailable, open_store
from trainer.store.s3 import PROBING, TRAINING, S3Store

pytestmark = pytest.mark.integration

BIG = 300_000
"""Bytes; enough for a body that is not sent with its headers."""


@pytest.fixture
def proxy(seaweed: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, s3_settings: Store) -> S3Store:
    """A store on the real server that is reached through the proxy."""
    return S3Store.from_settings(replace(s3_settings, endpoint=proxy.endpoint))


def puts(proxy: FaultProxy) -> int:
    return sum(seen.method == "PUT" for seen in proxy.requests)


def use(monkeypatch: pytest.MonkeyPatch, credentials: Credentials) -> None:
    for name, value in credentials.environment.items():
        monkeypatch.setenv(name, value)


class TestRetries:
    def test_slow_down_is_retried_until_it_passes(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.s3_error(503, "SlowDown", method="PUT", times=2)
        store.put("key", b"x" * BIG)
        assert puts(proxy) == 3
        assert store.get("key") == b"x" * BIG

    @pytest.mark.parametrize("if_absent", [False, True])
    def test_a_connection_reset_before_the_server_heard_is_retried(
            self, store: S3Store, proxy: FaultProxy, if_absent: bool) -> None:
        proxy.reset(method="PUT", times=2)
        store.put("key", b"x" * BIG, if_absent=if_absent)
        assert store.get("key") == b"x" * BIG

    def test_ones_own_conditional_put_whose_answer_was_lost_counts_as_existing(
            self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.cut(0, method="PUT")
        with pytest.raises(Exists):
            store.put("manifest.json", b"mine", if_absent=True)
        assert store.get("manifest.json") == b"mine"

    def test_a_lost_answer_to_a_plain_put_is_only_a_second_put(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.cut(0, method="PUT")
        store.put("slice", b"mine")
        assert puts(proxy) == 2
        assert store.get("slice") == b"mine"

    def test_a_conflict_of_two_conditional_puts_is_retried(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.s3_error(409, "ConditionalRequestConflict", method="PUT", times=3)
        store.put("manifest.json", b"mine", if_absent=True)
        assert puts(proxy) == 4
        assert store.get("manifest.json") == b"mine"

    def test_a_conflict_that_never_ends_is_unavailable(self, store: S3Store, proxy: FaultProxy) -> None:
        store._patience = replace(TRAINING, attempts=4)
        proxy.s3_error(409, "ConditionalRequestConflict", method="PUT", times=1000)
        with pytest.raises(StoreUnavailable, match="ConditionalRequestConflict"):
            store.put("manifest.json", b"mine", if_absent=True)
        assert puts(proxy) == 4

    @pytest.mark.parametrize("after", [0, 1, BIG - 1, 2 * BIG])
    def test_a_body_that_breaks_off_is_read_again(self, store: S3Store, proxy: FaultProxy, after: int) -> None:
        data = os.urandom(3 * BIG)
        store.put("slice", data)
        proxy.cut(after, method="GET", times=2)
        assert store.get("slice") == data
        assert sum(seen.method == "GET" for seen in proxy.requests) == 3

    def test_a_body_that_always_breaks_off_is_unavailable(self, store: S3Store, proxy: FaultProxy) -> None:
        store._patience = replace(TRAINING, attempts=4)
        store.put("slice", b"x" * BIG)
        proxy.cut(1000, method="GET", times=1000)
        with pytest.raises(StoreUnavailable, match=rf"^get {store.url}/slice at {proxy.endpoint}: the connection"):
            store.get("slice")
        assert sum(seen.method == "GET" for seen in proxy.requests) == 4

    def test_a_short_outage_is_ridden_out(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.down()
        with ThreadPoolExecutor(1) as pool:
            put = pool.submit(store.put, "key", b"x")
            assert not put.done()
            proxy.up()
            put.result(timeout=60)
        assert store.get("key") == b"x"

    def test_newer_credentials_are_looked_up_when_the_old_have_expired(
            self, store: S3Store, proxy: FaultProxy, seaweed: SeaweedFS, tmp_path: Path,
            monkeypatch: pytest.MonkeyPatch, s3_settings: Store) -> None:
        def write(keys: Credentials) -> None:
            file.write_text(f"[default]\naws_access_key_id={keys.access_key}\naws_secret_access_key={keys.secret_key}")

        file = tmp_path / "credentials"
        write(seaweed.reader)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        store = S3Store.from_settings(replace(s3_settings, endpoint=proxy.endpoint))
        assert list(store.list()) == []
        write(seaweed.admin)
        proxy.s3_error(400, "ExpiredToken", method="PUT")
        store.put("key", b"x")
        assert store.get("key") == b"x"


class TestRequests:
    def test_connections_are_kept(self, store: S3Store, proxy: FaultProxy) -> None:
        for number in range(5):
            store.put("key", bytes(number * BIG))
            store.get("key")
            list(store.list())
            store.delete("key")
        assert len(proxy.requests) == 20
        assert proxy.connections == 1

    @pytest.mark.parametrize("surprise", ["when_supported", "when_required"])
    @pytest.mark.parametrize("size", [100, BIG])
    def test_each_put_carries_our_crc_and_no_other_checksum_whatever_the_environment_says(
            self, proxy: FaultProxy, s3_settings: Store, monkeypatch: pytest.MonkeyPatch, surprise: str,
            size: int) -> None:
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", surprise)
        monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", surprise)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_RETRY_MODE", "legacy")
        store = S3Store.from_settings(replace(s3_settings, endpoint=proxy.endpoint))
        proxy.s3_error(503, "SlowDown", method="PUT")
        store.put("key", bytes(size), crc32=zlib.crc32(bytes(size)))
        seen = {name.lower(): value for name, value in proxy.requests[-1].headers.items()}
        assert [name for name in seen if name.startswith("x-amz-checksum")] == ["x-amz-checksum-crc32"]
        assert "x-amz-sdk-checksum-algorithm" not in seen
        assert "x-amz-trailer" not in seen
        assert "content-md5" not in seen
        assert seen["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert seen["content-length"] == str(size)

    @pytest.mark.parametrize("kind", [bytearray, memoryview])
    def test_an_object_is_not_copied_on_its_way(self, s3_settings: Store, kind: type) -> None:
        size = 32 << 20
        store, data = open_store(s3_settings), kind(bytearray(size))
        store.put("warm", b"x" * BIG)
        tracemalloc.start()
        try:
            store.put("slice", data)
            assert tracemalloc.get_traced_memory()[1] < size / 8
            store.get("slice")
            assert tracemalloc.get_traced_memory()[1] < size + size / 4
        finally:
            tracemalloc.stop()

    def test_a_refused_put_does_not_send_its_body(self, seaweed: SeaweedFS, s3_settings: Store) -> None:
        # A bare socket: an HTTP server's library would answer the Expect by itself.
        with socket.create_server(("127.0.0.1", 0)) as server:
            received = bytearray()

            def refuse() -> None:
                connection, _ = server.accept()
                with connection:
                    while b"\r\n\r\n" not in received:
                        received.extend(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                    connection.shutdown(socket.SHUT_WR)
                    while data := connection.recv(65536):
                        received.extend(data)

            thread = threading.Thread(target=refuse)
            thread.start()
            store = S3Store.from_settings(replace(s3_settings, endpoint=f"http://127.0.0.1:{server.getsockname()[1]}"))
            with pytest.raises(StoreRefused):
                store.put("slice", bytes(BIG))
            thread.join(timeout=20)
        assert len(received.partition(b"\r\n\r\n")[2]) == 0

    def test_the_endpoint_of_the_environment_is_used_with_path_style(
            self, proxy: FaultProxy, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint.replace("127.0.0.1", "localhost"))
        store = S3Store.from_settings(replace(s3_settings, endpoint=""))
        store.put("key", b"x")
        assert proxy.requests[-1].path.startswith("/ratchet/")

    def test_without_path_style_the_bucket_is_in_the_host_name(self, s3_settings: Store) -> None:
        store = S3Store.from_settings(replace(s3_settings, endpoint="http://s3.example", path_style=False))
        url = store._client.generate_presigned_url("get_object", Params={"Bucket": "ratchet", "Key": "k"})
        assert url.startswith("http://ratchet.s3.example/k")

    def test_without_an_endpoint_it_is_aws_in_the_region_of_the_chain_or_us_east_1(
            self, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def endpoint(region: str) -> str:
            return S3Store.from_settings(replace(s3_settings, endpoint="", region=region)).endpoint

        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        assert endpoint("") in {"https://s3.us-east-1.amazonaws.com", "https://s3.amazonaws.com"}
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        assert endpoint("") == "https://s3.eu-central-1.amazonaws.com"
        assert endpoint("ap-south-1") == "https://s3.ap-south-1.amazonaws.com"


class TestConditionalPuts:
    def test_a_server_that_ignores_the_condition_is_found_out_by_the_probe(
            self, store: S3Store, proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
        proxy.delay(0, method="PUT")
        proxy.answer(200, method="PUT")  # the second put of the probe, which should have been refused
        assert store.conditional_puts
        store.probe()
        assert not store.conditional_puts
        assert "does not honour conditional puts" in caplog.text
        store.put("manifest.json", b"first", if_absent=True)
        with pytest.raises(Exists):
            store.put("manifest.json", b"second", if_absent=True)
        assert store.get("manifest.json") == b"first"
        assert not any("If-None-Match" in seen.headers for seen in proxy.requests[-4:])

    def test_a_server_that_refuses_the_condition_is_found_out_by_a_put(
            self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.s3_error(501, "NotImplemented", method="PUT")
        store.put("manifest.json", b"first", if_absent=True)
        assert not store.conditional_puts
        with pytest.raises(Exists):
            store.put("manifest.json", b"second", if_absent=True)
        assert store.get("manifest.json") == b"first"

    def test_304_of_old_servers_means_there_is_one(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.answer(304, method="PUT")
        with pytest.raises(Exists):
            store.put("manifest.json", b"x", if_absent=True)


class TestRefusals:
    """Each is one line: operation, place, endpoint, reason, what to do."""

    def test_a_missing_bucket(self, s3_settings: Store) -> None:
        store = open_store(replace(s3_settings, url="s3://no-such-bucket/p"))
        with pytest.raises(StoreRefused, match=r"^list s3://no-such-bucket/p/.* there is no such bucket: make it"):
            store.probe()
        with pytest.raises(StoreRefused, match="no such bucket"):
            store.put("key", b"")
        with pytest.raises(StoreRefused, match="no such bucket"):
            store.get("key")

    def test_an_unknown_access_key(self, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, Credentials())
        with pytest.raises(StoreRefused, match=r"InvalidAccessKeyId: .*: look at the access key, the secret"):
            open_store(s3_settings).probe()

    def test_a_wrong_secret(self, s3_settings: Store, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, Credentials(access_key=seaweed.admin.access_key))
        with pytest.raises(StoreRefused, match=r"SignatureDoesNotMatch: .*: look at the access key, the secret"):
            open_store(s3_settings).probe()

    def test_a_key_that_may_only_read(
            self, s3_settings: Store, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        open_store(s3_settings).put("key", b"x")
        use(monkeypatch, seaweed.reader)
        store = open_store(s3_settings)
        assert store.get("key") == b"x"
        with pytest.raises(StoreRefused, match=rf"^put {store.url}/\.ratchet-probe-.*AccessDenied.*s3:PutObject$"):
            store.probe()
        with pytest.raises(StoreRefused, match=r"AccessDenied.*: allow s3:DeleteObject$"):
            store.delete("key")

    @pytest.mark.parametrize(("method", "permission"), [("GET", "s3:ListBucket"), ("PUT", "s3:PutObject"),
                                                        ("DELETE", "s3:DeleteObject")])
    def test_the_probe_names_the_permission_that_lacks(
            self, store: S3Store, proxy: FaultProxy, method: str, permission: str) -> None:
        proxy.s3_error(403, "AccessDenied", method=method)
        with pytest.raises(StoreRefused, match=f"AccessDenied: told by the proxy: allow {permission}"):
            store.probe()

    def test_the_probe_names_the_permission_to_get(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.s3_error(403, "AccessDenied", method="GET", path=r"/\.ratchet-probe-[0-9a-f]+($|\?x-id)")
        with pytest.raises(StoreRefused, match="AccessDenied: told by the proxy: allow s3:GetObject"):
            store.probe()
        proxy.honest()
        assert list(store.list()) == [], "what the probe wrote is gone though it failed"

    def test_no_credentials(self, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreRefused, match="no credentials found: set AWS_ACCESS_KEY_ID"):
            open_store(s3_settings).probe()

    def test_half_credentials(self, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreRefused, match=r"Partial credentials .* AWS_SECRET_ACCESS_KEY.*look at"):
            open_store(s3_settings)

    def test_a_profile_that_is_not_there(self, s3_settings: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        with pytest.raises(StoreRefused, match=r"profile \(nobody\) could not be found: look at"):
            open_store(s3_settings)

    @pytest.mark.parametrize(("status", "code", "kind", "words"), [
        (400, "ExpiredToken", StoreRefused, "renew the credentials"),
        (403, "RequestTimeTooSkewed", StoreUnavailable, "the node clock is wrong"),
        (403, "AllAccessDisabled", StoreRefused, "allow s3:PutObject"),
        (301, "PermanentRedirect", StoreRefused, "set store.region"),
        (400, "EntityTooLarge", StoreRefused, "EntityTooLarge: told by the proxy"),
        (400, "BadDigest", StoreError, "do not match their CRC32"),
    ])
    def test_what_s3_says_by_name(self, store: S3Store, proxy: FaultProxy, status: int, code: str,
                                  kind: type[StoreError], words: str) -> None:
        proxy.s3_error(status, code, method="PUT", times=1000)
        with pytest.raises(StoreError, match=words) as caught:
            store.put("run/key", b"x")
        assert type(caught.value) is kind
        assert str(caught.value).startswith(f"put {store.url}/run/key at {proxy.endpoint}: {code}: told by the proxy")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(("body", "status", "kind"), [
        (b"<html><p>welcome</html>", 200, "text/html"),
        (b"<html><body><p>Well-formed.</p></body></html>", 200, "application/xml"),
        (b'{"message": "hello"}', 200, "application/json"),
        (b"", 200, "text/plain"),
        (b"<!DOCTYPE HTML><html><body>Not Found</body></html>", 404, "text/html"),
        (b'{"error": "not found"}', 404, "application/json"),
        (b"Client sent an HTTP request to an HTTPS server.\n", 400, "text/plain"),
        (b"", 405, "text/plain"),
    ])
    def test_an_endpoint_that_is_not_s3(self, s3_settings: Store, body: bytes, status: int, kind: str) -> None:
        with plain_web_server(body, status, kind) as url:
            store = open_store(replace(s3_settings, endpoint=url))
            with pytest.raises(StoreRefused, match=f"at {url}: the endpoint answers but is not S3.*store.endpoint$"):
                store.probe()

    def test_a_server_that_speaks_no_http(self, s3_settings: Store) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            def talk() -> None:
                for _ in range(2):
                    connection, _ = server.accept()
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    connection.close()

            thread = threading.Thread(target=talk)
            thread.start()
            store = open_store(replace(s3_settings, endpoint=f"http://127.0.0.1:{server.getsockname()[1]}"))
            with pytest.raises(StoreUnavailable, match="the connection broke"):
                store.probe()
            thread.join(timeout=20)

    def test_a_server_that_accepts_everything_and_keeps_nothing(self, store: S3Store, proxy: FaultProxy) -> None:
        proxy.answer(200, method="PUT", times=1000)
        with pytest.raises(StoreRefused, match="accepts objects but does not keep them"):
            store.probe()


class TestUnavailable:
    def test_a_dead_endpoint_is_told_within_seconds(self, s3_settings: Store) -> None:
        [port] = free_ports(1)
        store = open_store(replace(s3_settings, endpoint=f"http://127.0.0.1:{port}"))
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match="can't connect: Connection refused"):
            store.probe()
        assert time.monotonic() - begin < 60

    def test_an_endpoint_that_takes_connections_and_never_answers_is_told_in_bounded_time(
            self, store: S3Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trainer.store.s3.PROBING", replace(PROBING, read_seconds=0.3))
        proxy.delay(60, times=1000)
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            store.probe()
        assert time.monotonic() - begin < 60
        assert len(proxy.requests) == 2

    def test_a_name_that_does_not_resolve(self, s3_settings: Store) -> None:
        store = open_store(replace(s3_settings, endpoint="http://minio.invalid:9000"))
        with pytest.raises(StoreUnavailable, match=r"at http://minio.invalid:9000: can't connect: .*: look at"):
            store.probe()

    @pytest.mark.parametrize(("status", "code"), [
        (503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable")])
    def test_a_server_that_stays_overloaded(self, store: S3Store, proxy: FaultProxy, status: int, code: str) -> None:
        proxy.s3_error(status, code, times=1000)
        with pytest.raises(StoreUnavailable, match=f"{code}: told by the proxy: still so after all retries"):
            store.probe()

    @pytest.mark.parametrize(("status", "page"), [
        (502, "<html>Bad Gateway</html>"), (500, "<html>500 Internal Server Error</html>"), (500, "")])
    def test_a_gateway_without_a_server_behind_it(
            self, store: S3Store, proxy: FaultProxy, status: int, page: str) -> None:
        proxy.answer(status, page, times=1000)
        with pytest.raises(StoreUnavailable, match=str(status)):
            store.probe()

    def test_a_listing_that_is_cut_short_by_the_server_is_asked_for_again(
            self, store: S3Store, proxy: FaultProxy) -> None:
        store.put("key", b"x")
        proxy.answer(200, "<?xml version='1.0'?><ListBucketResult><Name>ratchet</Na", method="GET")
        assert list(store.list()) == [("key", 1)]


def test_a_missing_object_is_not_confused_with_a_missing_server(store: S3Store) -> None:
    with pytest.raises(NotFound, match=rf"^get {store.url}/none at {store.endpoint}: there is no such object$"):
        store.get("none")


@pytest.mark.parametrize("ahead", [-600.0, 0.0, 600.0])
def test_the_servers_clock_is_read_from_its_answers(ahead: float, store: S3Store, proxy: FaultProxy) -> None:
    assert store.clock_ahead is None, "nothing was asked yet"
    proxy.clock_ahead = ahead
    store.probe()
    assert store.clock_ahead is not None
    assert abs(store.clock_ahead + ahead) < 60
