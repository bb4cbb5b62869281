"""Host certificates: whether an authority of known_hosts vouches for the key of a server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import paramiko


def certified(blob: paramiko.pkey.PublicBlob) -> str:
    """Give the key that a certificate is about, as `type base64`.

    Raises:
        ValueError, UnsupportedAlgorithm: it is no certificate.
    """
    found = _identity(blob)
    if not isinstance(found, SSHCertificate):
        raise ValueError("is no certificate")  # noqa: TRY004 - the file's content, not our types
    return found.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _identity(blob: paramiko.pkey.PublicBlob) -> object:
    text = f"{blob.key_type} {base64.b64encode(blob.key_blob).decode()}"
    return load_ssh_public_identity(text.encode())


def unvouched(
    key: paramiko.PKey, authorities: Iterable[paramiko.PKey], name: str, now: float
) -> str:
    """Say why no authority vouches for the key, "" when one does.

    Args:
        key: as the server showed it; paramiko keeps its certificate as `public_blob`.
        authorities: keys that known_hosts marks @cert-authority for this server.
        name: of the server, without its port, as its certificate must have it.
        now: seconds since 1970.
    """
    blob = getattr(key, "public_blob", None)
    if blob is None:
        return "it shows no certificate"
    try:
        found = _identity(blob)
        if not isinstance(found, SSHCertificate):
            return "it shows no certificate"
        found.verify_cert_signature()
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        return "its certificate is damaged or forged"
    if found.type is not SSHCertificateType.HOST:
        return "its certificate is one for users"
    signer = found.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    if signer not in {f"{each.get_name()} {each.get_base64()}" for each in authorities}:
        return "its certificate is signed by another authority"
    if not found.valid_after <= now < found.valid_before:
        return "its certificate has expired, or is not valid yet"
    # As ssh does: a host certificate without names is good for no host.
    if name.encode() not in found.valid_principals:
        names = ", ".join(each.decode(errors="replace") for each in found.valid_principals)
        return f"its certificate is for {names or 'no name'}"
    if found.critical_options:
        return "its certificate has conditions that nobody knows"
    return ""
