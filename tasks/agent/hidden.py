"""Secrets on this host: what is written of one is a salted hash, to tell a changed value by."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, Dict, List

from .desk import Refused


def salted(value: str) -> Dict[str, str]:
    """What a run's record holds of a secret."""
    salt = secrets.token_hex(16)
    return {"salt": salt, "sha256": _hash(salt, value)}


def _hash(salt: str, value: str) -> str:
    return hashlib.sha256((salt + value).encode()).hexdigest()


def same(record: Dict[str, Any], values: Dict[str, str]) -> bool:
    """Whether a run was launched with these secrets: the same names, and the same values."""
    kept = record.get("secrets")
    if not isinstance(kept, dict) or kept.keys() != values.keys():
        return False
    return all(_is(kept[name], values[name]) for name in values)


def _is(kept: Any, value: Any) -> bool:
    if not isinstance(kept, dict) or type(value) is not str:
        return False
    return hmac.compare_digest(_hash(str(kept.get("salt")), value), str(kept.get("sha256")))


def check(values: Dict[str, str], names: List[str]) -> None:
    """Raises Refused, bad-request, unless `values` are texts for just these names; shows none."""
    for name, value in values.items():
        if type(value) is not str or "\0" in value:
            raise Refused("bad-request", f"secrets: {name!r} is no text that a variable can hold")
    if sorted(values) != sorted(names):
        raise Refused("bad-request", "secrets: are not those that spec.secret_names names")


def chosen(values: Dict[str, str], record: Dict[str, Any]) -> Dict[str, str]:
    """Of what the desk sent, what a run of old needs. Raises Refused, refused, for the rest."""
    names = needed(record)
    missing = [name for name in names if name not in values]
    if missing:
        raise Refused(
            "refused",
            f"secret {missing[0]}: that run had it, and the desk sent none; name it under `secrets`"
            " in hosts.yaml",
        )
    return {name: values[name] for name in names}


def needed(record: Dict[str, Any]) -> List[str]:
    """The names of the secrets that a run was launched with."""
    spec = record.get("spec")
    names = spec.get("secret_names") if isinstance(spec, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []
