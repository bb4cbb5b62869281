"""The one door to a host: connection, retries, timeouts, host keys, frames, the agent's source.

with Link(host, notify=print) as link:
    reply = link.ask("health", {"root": host.root, "run_id": None}, deadline=20)
"""

from tasks.link.asking import Link, Reply
from tasks.link.introduction import Introduction, introduce

__all__ = ["Introduction", "Link", "Reply", "introduce"]
