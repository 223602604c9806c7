"""Who is alive, judged by this placer's own monotonic clock since it saw a lease change; no stamp is ever compared."""

from __future__ import annotations

from services.placer.core.ledger import LEADER, Ledger
from shared.messages import Lease


class Leases:
    """A lease runs out when it was not seen to change for its time to live.

    An observer that has just started, was stopped or was cut off has missed renewals: it grants everyone a full time
    to live from then on (`grant`). A name that no lease stands behind gets the same time from when it is first asked
    about, since a record may be read before its owner's lease is.
    """

    def __init__(self, ledger: Ledger, ttl_us: int) -> None:
        self._ledger = ledger
        self._ttl_us = ttl_us
        self._granted_us = 0
        self._asked_us: dict[str, int] = {}

    def grant(self, now_us: int) -> None:
        """Everyone has been alive until now."""
        self._granted_us = now_us
        self._asked_us.clear()

    def alive(self, name: str, now_us: int) -> bool:
        """False where the lease ran out or was given up."""
        stored = self._ledger.leases.get(name)
        if stored is None:
            return now_us - self._asked_us.setdefault(name, now_us) < self._ttl_us
        if stored.value is None or not stored.value.ttl_us:
            return False
        return not self._silent(stored.seen_us, stored.value, now_us)

    def _silent(self, seen_us: int, lease: Lease, now_us: int) -> bool:
        return now_us - max(seen_us, self._granted_us) >= max(self._ttl_us, lease.ttl_us)

    def others_alive(self, me: str, now_us: int) -> bool:
        return any(name not in {me, LEADER} and self.alive(name, now_us) for name in self._ledger.leases)

    def expired(self, now_us: int) -> list[str]:
        """Placers whose lease is still written and did not change for its time; one that was given up is no exception,
        since who stops has its last batches under way.
        """
        written = ((name, stored) for name, stored in self._ledger.leases.items() if name != LEADER)
        return [name for name, s in written if s.value is not None and self._silent(s.seen_us, s.value, now_us)]
