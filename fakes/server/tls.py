"""Certificates: one that signs itself, made when it is needed, or the files that somebody names."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import ssl
from pathlib import Path
from typing import Final, NamedTuple

VALID_DAYS: Final = 30


class TlsError(OSError):
    """A certificate or key cannot be used. Causes: no such file, not PEM, not a pair, the key has a passphrase."""


class Certificate(NamedTuple):
    """PEM files. A client trusts a self-signed ``cert_file`` by naming it: ``FeatureStoreClient(…, ca_file=…)``."""

    cert_file: Path
    key_file: Path

    def context(self) -> ssl.SSLContext:
        """What the server needs. Raises TlsError naming the file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in self:
            try:
                path.read_bytes()
            except OSError as error:
                raise TlsError(error.errno, f"TLS: cannot read {path} ({error.strerror})") from None
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise TlsError(
                errno.EINVAL, f"TLS: {self.cert_file} and {self.key_file} are no usable pair ({reason})"
            ) from None
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a passphrase")  # else OpenSSL asks on the terminal


def _ascii(host: str) -> str:
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        raise TlsError(errno.EINVAL, f"TLS: no certificate can name the host {host!r}") from None


def self_signed(folder: Path, *hosts: str) -> Certificate:
    """Make ``cert.pem`` and ``key.pem`` (readable by the owner only) in ``folder``, good for loopback and ``hosts``,
    for ``VALID_DAYS`` days. Needs the ``cryptography`` library. Raises TlsError for a host that none can name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "deltaproof fake Feature Store")])
    names: dict[str, x509.GeneralName] = {}
    for host in ("localhost", "127.0.0.1", "::1", *hosts):
        try:
            names[host] = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            names[host] = x509.DNSName(_ascii(host))
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # for clients whose clock is behind
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(names.values()), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    made.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(made.key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)
    return made
