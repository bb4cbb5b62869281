"""The one door to a host: connection, retries, timeouts, host keys, frames, the agent's source.

with Link(host, notify=print) as link:
    reply = link.ask("health", {"root": host.root, "run_id": None}, deadline=20)
"""

from tasks.link.asking import Link, Reply

__all__ = ["Link", "Reply"]
