"""Whoever asked to have held pods bound, until the ledger says that they are or are not; no I/O."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from services.placer.core.intents import Intent
from services.placer.core.records import reply_of
from shared.effects import Reply
from shared.messages import PlaceReply, RequestRecord, State


@dataclass(frozen=True, slots=True)
class AwaitBinding:
    """Stands among the effects of an intent for the answer that is not there yet; the shell never sees it."""

    request_id: str
    reply: str
    intent: Intent


class Bindings:
    """Whichever placer carries it out: how it ended is read from the record."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[AwaitBinding]] = defaultdict(list)

    def wait(self, asked: AwaitBinding) -> None:
        self._waiting[asked.request_id].append(asked)

    def answers(self, request_id: str, record: RequestRecord | None, ledger_id: str | None) -> list[Reply]:
        """What there is to say now that its record has changed; nothing while it is placed and not yet bound."""
        if request_id not in self._waiting or (record is not None and record.state in {State.HELD, State.PLACED}):
            return []
        said = PlaceReply(outcome="unknown", request_id=request_id)
        if record is not None and ledger_id is not None:
            said = reply_of(record, ledger_id)
        return [Reply(each.reply, said) for each in self._waiting.pop(request_id)]

    def drop(self) -> list[Intent]:
        """Nobody can say any more how they end."""
        dropped = [each.intent for asked in self._waiting.values() for each in asked]
        self._waiting.clear()
        return dropped
