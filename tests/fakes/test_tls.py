"""HTTPS: the facade and plain clients trust the server's certificate when it is named, and refuse it when it is not."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pyarrow as pa
import pytest
import urllib3

from deltaproof.fakes.feature_store_py import FeatureStoreClient, TransportError
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import ResetFault, TruncateFault
from deltaproof.fakes.server.tls import Certificate, TlsError, self_signed

from .kit import PROJECT, VERSION, VIEW, make_view, sdk_rows


def connect(server: FeatureStoreServer, ca_file: str | None) -> FeatureStoreClient:
    return FeatureStoreClient(
        "deltaproof",
        "deltaproof",
        "local",
        server.endpoint,
        featuredb_username="rank0",
        featuredb_password="x",
        ca_file=ca_file,
    )


def test_the_facade_works_over_tls_with_the_certificate_named() -> None:
    with FeatureStoreServer(tls=True) as server:
        assert server.endpoint == f"https://127.0.0.1:{server.port}"
        make_view(server.store)
        client = connect(server, server.ca_file)
        project = client.get_project(PROJECT)
        assert project is not None
        view = project.get_dynamic_embedding_feature_view(VIEW)
        assert view is not None
        for ts, fault, code in (
            (5, None, None),
            (6, ResetFault(id="r"), "ConnectionLost"),
            (7, TruncateFault(id="t", bytes_kept=5), "ReplyTruncated"),
        ):
            if fault:
                server.add_fault(fault)
            view.write_features_arrow(batch=sdk_rows(["t"], [1], [[float(ts)]]), version=VERSION, ts=ts)
            errors = view.write_flush()["errors"]
            assert [error.code for error in errors] == ([code] if code else [])
        found = view.lookup_arrow(VERSION, pa.array(["t"]), pa.array([1]))
        assert found.column("embedding").to_pylist() == [[7.0]]
        client.close()
        folder = Path(server.ca_file or "").parent
        assert folder.exists()
    assert not folder.exists()


def test_a_proxy_that_keeps_a_client_from_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    with FeatureStoreServer(tls=True) as server, pytest.raises(TransportError) as caught:
        connect(server, server.ca_file)
    assert f"no connection to 127.0.0.1:{server.port} by way of the proxy 127.0.0.1:9" in str(caught.value)


def test_a_certificate_that_is_not_named_is_not_trusted(tmp_path: Path) -> None:
    other = self_signed(tmp_path)
    with FeatureStoreServer(tls=True) as server:
        for ca_file in (None, str(other.cert_file)):
            with pytest.raises(TransportError):
                connect(server, ca_file)
        with pytest.raises(urllib3.exceptions.HTTPError):
            urllib3.PoolManager(retries=False).request("GET", f"http://127.0.0.1:{server.port}/health", timeout=10)
        with urllib3.PoolManager(ca_certs=server.ca_file, retries=False) as http:
            for host in ("127.0.0.1", "localhost"):
                assert http.request("GET", f"https://{host}:{server.port}/health", timeout=10).status == 200


def test_a_strict_verifier_accepts_the_certificate_and_the_key_is_private(tmp_path: Path) -> None:
    made = self_signed(tmp_path, "example.test")
    assert stat.S_IMODE(made.key_file.stat().st_mode) == 0o600
    context = ssl.create_default_context(cafile=str(made.cert_file))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with FeatureStoreServer(tls=made) as server:
        assert server.ca_file == str(made.cert_file)
        with urllib3.PoolManager(ssl_context=context, retries=False) as http:
            assert http.request("GET", f"{server.endpoint}/health", timeout=10).status == 200


def test_a_host_in_any_script_is_named_and_what_is_none_refused(tmp_path: Path) -> None:
    assert b"xn--" in ssl.PEM_cert_to_DER_cert(self_signed(tmp_path, "bücher.example").cert_file.read_text())
    for host in ("\udcff", "a..b", "ä" * 70):
        with pytest.raises(TlsError, match="no certificate can name the host"):
            self_signed(tmp_path, host)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    good, other = self_signed(tmp_path), self_signed_in(tmp_path / "other")
    for pair, message in (
        (Certificate(tmp_path / "none.pem", good.key_file), "none.pem"),
        (Certificate(good.cert_file, other.key_file), "no usable pair"),
        (Certificate(good.key_file, good.key_file), "no usable pair"),
    ):
        with pytest.raises(OSError, match="TLS: ") as caught:
            FeatureStoreServer(tls=pair).start()
        assert message in str(caught.value)


def self_signed_in(folder: Path) -> Certificate:
    folder.mkdir()
    return self_signed(folder)
