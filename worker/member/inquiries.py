"""A member's inquiries after the workers that are missing from exchanges that take too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradserver.protocol.errors import DeadlineError, GradServerError
from gradserver.protocol.exchange import BUCKET, TRANSFER, ExchangeKey, Operation
from gradserver.protocol.messages import Inquire, Missing
from gradserver.worker.member.effects import Effects
from gradserver.worker.member.exchanges import Exchanges
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.waiter import Waiter


class Inquiries:
    """Inquiries without an answer, by exchange. Not safe to share: the session's lock guards it."""

    def __init__(self, effects: Effects, identity: Identity, rounds: Rounds, exchanges: Exchanges) -> None:
        self._effects = effects
        self._identity = identity
        self._rounds = rounds
        self._exchanges = exchanges
        self._asked: dict[tuple[int, ExchangeKey], list[Waiter]] = {}

    def ask(self, key: ExchangeKey, waiter: Waiter) -> tuple[Inquire, int] | None:
        """Give a question, and the shard that it is for; None if that exchange is not under way.

        The waiter's value becomes the names of the workers.
        """
        shard = self._exchanges.shard_with(key)
        return None if shard is None else (self.ask_at(shard, key, waiter), shard)

    def ask_at(self, shard: int, key: ExchangeKey, waiter: Waiter) -> Inquire:
        """Give a question for ``shard``. The waiter's value becomes the names of the workers that it misses."""
        self._asked.setdefault((shard, key), []).append(waiter)
        return Inquire(key)

    def answered(self, message: Missing, shard: int) -> None:
        """Take the names of workers that are missing from an exchange."""
        for waiter in self._asked.pop((shard, message.key), ()):
            self._effects.complete(waiter, value=message.workers)

    def failed(self, key: ExchangeKey, error: GradServerError, shard: int) -> None:
        """Take the word that an exchange that was asked about fails."""
        for waiter in self._asked.pop((shard, key), ()):
            self._effects.complete(waiter, error)

    def describe(self, key: ExchangeKey, operation: Operation) -> str:
        """Name an exchange in a text."""
        rank_of, plan = self._identity.rank_of, self._rounds.plan
        if key.stream == BUCKET and plan is not None:
            return f"bucket {plan.buckets[key.part].key!r} of round {key.number}"
        what = str(replace(operation, root=rank_of(operation.root)))
        if key.stream == TRANSFER:
            what += f" from rank {rank_of(key.source)} to rank {rank_of(key.target)} (tag {key.part})"
        return what

    def overdue(self, key: ExchangeKey, operation: Operation, seconds: float, missing: Sequence[str]) -> DeadlineError:
        """Make the error for a wait of ``seconds`` for an exchange that has run out."""
        plan = self._rounds.plan
        bucket = plan.buckets[key.part].key if key.stream == BUCKET and plan is not None else ""
        return DeadlineError(
            f"{self.describe(key, operation)} is not done after {seconds:g} s"
            + (f"; still missing: {', '.join(missing)}" if missing else ""),
            missing=tuple(missing),
            bucket=bucket,
            round=key.number if bucket else -1,
        )

    def give_up(self) -> list[Waiter]:
        """Give the handles that wait for something that will not come."""
        waiting, self._asked = self._asked, {}
        return [waiter for waiters in waiting.values() for waiter in waiters]
