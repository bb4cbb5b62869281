"""What tests ask of a host, and what they let it say."""

from __future__ import annotations

NONCE = "0f" * 16
HEALTH = ("health", {"root": "~/fab", "run_id": None})
SLOW = "import time\ntime.sleep(60)\n"


def is_absent(reply) -> bool:
    """Say whether a host answered HEALTH, and has no run."""
    return reply["state"] == "absent"


def frame(kind: str, payload: str, nonce: str = NONCE) -> str:
    """Give source text that sends one frame."""
    return (
        f"import os;b={payload!r}.encode('utf-8','surrogatepass')\n"
        f"os.write(1,b'\\x02{nonce} {kind} %d\\n%s\\x03\\n'%(len(b),b))\n"
    )
