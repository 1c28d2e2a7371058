"""Who a peer is: one ed25519 key, the id that is its hash, and the TLS certificate made from it.

For every transport and for signed directory records. Whether that peer may take part in a run is invite.py's question.

Certificates. Python's ssl cannot ask a client for a certificate without checking it against an authority, and peers have
none in common at that level. So every certificate is issued by a key that is derived from a public constant: the chain
proves nothing and is there for the library only. What counts is checked by the caller: TLS 1.3 proves that the other
side holds the certificate's key, and `certificate_key_id` of it must equal the key id in the name that side claims.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
import ssl
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.core.messages import Peer

if TYPE_CHECKING:  # imported where certificates are made and read: 30 ms, which a command without a network saves
    from cryptography import x509

KEY_ID_BYTES = 20  # of SHA-256: finding another key with the same id takes 2^160 tries
KEY_ID_CHARS = KEY_ID_BYTES * 8 // 5
PUBLIC_BYTES = 32
_FROM = datetime.datetime(2000, 1, 1)  # no peer's clock is trusted for certificates: they are always valid
_UNTIL = datetime.datetime(9999, 12, 31)


class Identity:
    """A key in the hands of one process. `name` is the peer's name in core (core/names.py): the key id, this process's incarnation,
    and, as soon as an invite has made its pass, `tag`: that invite's id and limit. Without it no peer of a run admits it."""

    def __init__(self, key: Ed25519PrivateKey, incarnation: str = "") -> None:
        self.key = key
        self.public = public_bytes(key)
        self.key_id = key_id(self.public)
        self.incarnation = incarnation or f"{time.time_ns():x}"  # later starts have larger ones
        self.tag = ""

    @property
    def name(self) -> Peer:
        return f"{self.key_id}.{self.incarnation}.{self.tag}" if self.tag else f"{self.key_id}.{self.incarnation}"

    @classmethod
    def new(cls, incarnation: str = "") -> Identity:
        return cls(Ed25519PrivateKey.generate(), incarnation)

    @classmethod
    def load(cls, path: str | os.PathLike[str], incarnation: str = "") -> Identity:
        """The key kept in `path`; a new one is made and kept there when there is no such file."""
        return cls(load_key(path), incarnation)

    def sign(self, purpose: str, data: bytes) -> bytes:
        return sign(self.key, purpose, data)


def key_id(public: bytes) -> str:
    return base64.b32encode(hashlib.sha256(public).digest()[:KEY_ID_BYTES]).decode().lower()


def key_id_of(name: Peer) -> str:
    """The key id inside a peer's name; ValueError when the name has another form. What a name says of its invite is compared with the
    pass (passes.py)."""
    fields = name.split(".")
    length = KEY_ID_CHARS
    plain = all(field.isalnum() and field.isascii() and len(field) <= length for field in fields)
    if not plain or len(fields) not in (2, 4) or len(fields[0]) != length:
        raise ValueError(
            f"'{name[:128]}' is not a peer's name; expected '<key id of {length} letters>.<incarnation>.<invite>.<limit>'"
        )
    return fields[0]


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def sign(key: Ed25519PrivateKey, purpose: str, data: bytes) -> bytes:
    """The purpose is signed too, so that a signature of one kind never passes as one of another."""
    return key.sign(_tagged(purpose, data))


def verify(public: bytes, purpose: str, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _tagged(purpose, data))
    except (InvalidSignature, ValueError):  # ValueError: not a public key at all
        return False
    return True


def load_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read a key, or make one and keep it readable by its owner only."""
    file = Path(path)
    if not file.exists():
        return _create_key(file)
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise ValueError(f"{file}: others can read this private key; run: chmod 600 {file}")
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except ValueError as error:
        raise ValueError(f"{file}: not a private key in PEM ({error}); delete it to have a new one made") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{file}: holds a key of another kind than ed25519; delete it to have a new one made")
    return key


# ------------------------------------------------------------------------------------------------------------------ TLS


def server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # sessions are not resumed
    return _prepared(context, identity)


def client_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # peers are known by their key, not by a host name
    return _prepared(context, identity)


def certificate_key_id(certificate: bytes) -> str:
    """The key id of the (DER) certificate that the other side of a TLS connection has shown."""
    from cryptography import x509

    key = x509.load_der_x509_certificate(certificate).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("the certificate's key is not ed25519")
    return key_id(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def _prepared(context: ssl.SSLContext, identity: Identity) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    issuer = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"shoal: anybody may know this key").digest())
    root = _certificate(issuer, "shoal", issuer)
    context.load_verify_locations(cadata=root.public_bytes(serialization.Encoding.PEM).decode())
    leaf = _certificate(identity.key, identity.key_id, issuer)
    pem = leaf.public_bytes(serialization.Encoding.PEM) + _pem(identity.key)
    with tempfile.TemporaryDirectory() as private:  # ssl reads keys from files only; the directory has mode 700
        file = Path(private) / "identity.pem"
        file.write_bytes(pem)
        context.load_cert_chain(file)
    return context


def _certificate(key: Ed25519PrivateKey, name: str, issuer: Ed25519PrivateKey) -> x509.Certificate:
    """Of `key`, issued by `issuer`; an authority's when they are the same."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    own = public_bytes(key) == public_bytes(issuer)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=own, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
        .sign(issuer, algorithm=None)
    )


# -------------------------------------------------------------------------------------------------------------- private


def _tagged(purpose: str, data: bytes) -> bytes:
    return b"shoal " + purpose.encode() + b"\0" + data


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _create_key(file: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(_pem(key))
    return key
