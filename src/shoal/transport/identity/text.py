"""How an invite is written: bytes as letters and digits, and addresses in few bytes, for a text that people paste into chats.

Letters and digits alone: chats take `_` and `*` for formatting, lines break at `-`, and a double click selects the whole.
For invite.py, which knows what the bytes mean.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import string
from collections.abc import Iterable

from shoal.transport.identity.identity import PUBLIC_BYTES

LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
BASE58 = "".join(letter for letter in LETTERS if letter not in "0OIl")  # of libp2p's peer ids
CHECK_BYTES = 4  # of SHA-256: a letter that was lost or changed is noticed
ED25519 = bytes.fromhex("0024080112") + bytes([PUBLIC_BYTES])  # begins a peer id that holds the key itself (libp2p)
_V6, _KEY, _SAME_KEY, _TEXT = 1, 2, 4, 8  # kinds of an address
_DIRECT = re.compile(r"(.+):(\d+)")
_LIBP2P = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)/p2p/([1-9A-HJ-NP-Za-km-z]+)")


def encoded(data: bytes) -> str:
    return _digits(int.from_bytes(b"\1" + _check(data) + data), LETTERS)


def decoded(text: str) -> bytes:
    """ValueError: a letter is missing, or another."""
    if not text.isalnum() or not text.isascii():
        raise ValueError("not letters and digits")
    data = _bytes(_number(text, LETTERS))[1:]
    if _check(data[CHECK_BYTES:]) != data[:CHECK_BYTES]:
        raise ValueError("its check does not fit")
    return data[CHECK_BYTES:]


def packed(addresses: Iterable[str]) -> tuple[bytes, ...]:
    """HOST:PORT in 7 bytes, libp2p's in 39, or 7 where the peer is that of the address before; any other as it is."""
    result, key = [], b""
    for address in addresses:
        data = _packed(address, key)
        result.append(data if unpacked((data,), key) == (address,) else bytes([_TEXT]) + address.encode())
        if result[-1][0] & _KEY:
            key = data[-PUBLIC_BYTES:]
    return tuple(result)


def unpacked(addresses: Iterable[bytes], key: bytes = b"") -> tuple[str, ...]:
    """ValueError: not what `packed` makes."""
    result = []
    for data in addresses:
        kind, data = data[0] if data else 0, data[1:]
        if kind & _TEXT:
            result.append(data.decode())
            continue
        if kind & _KEY:
            data, key = data[:-PUBLIC_BYTES], data[-PUBLIC_BYTES:]
        host, port = ipaddress.ip_address(data[:-2]), int.from_bytes(data[-2:])
        peer = "1" + _digits(int.from_bytes(ED25519 + key), BASE58)  # the 1 is the byte 0 at its beginning
        libp2p = kind & (_KEY | _SAME_KEY)
        result.append(f"/ip{host.version}/{host}/tcp/{port}/p2p/{peer}" if libp2p else f"{host}:{port}")
    return tuple(result)


def _packed(address: str, key: bytes) -> bytes:
    direct, libp2p = _DIRECT.fullmatch(address), _LIBP2P.fullmatch(address)
    match = libp2p or direct
    text = bytes([_TEXT]) + address.encode()
    if match is None:
        return text
    try:
        host, port = ipaddress.ip_address(match[1]), int(match[2]).to_bytes(2)
    except (ValueError, OverflowError):  # a name
        return text
    kind = _V6 if host.version == 6 else 0
    if libp2p is None:
        return bytes([kind]) + host.packed + port
    peer_id = _bytes(_number(libp2p[3], BASE58))
    prefix, own = peer_id[:-PUBLIC_BYTES], peer_id[-PUBLIC_BYTES:]
    if prefix != ED25519[1:]:  # without the byte 0 at its beginning
        return text
    return bytes([kind | (_SAME_KEY if own == key else _KEY)]) + host.packed + port + (b"" if own == key else own)


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECK_BYTES]


def _digits(number: int, letters: str) -> str:
    digits = []
    while number:
        number, digit = divmod(number, len(letters))
        digits.append(letters[digit])
    return "".join(reversed(digits))


def _number(text: str, letters: str) -> int:
    values = {letter: value for value, letter in enumerate(letters)}
    number = 0
    for letter in text:
        number = number * len(letters) + values[letter]
    return number


def _bytes(number: int) -> bytes:
    return number.to_bytes(-(-number.bit_length() // 8))
