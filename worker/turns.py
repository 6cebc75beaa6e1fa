"""Calls of a worker in a group where rounds do not wait for all members: it requests a round, and takes turns."""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.worker.agreement import Agreement
from gradserver.worker.handle import Timeout, seconds
from gradserver.worker.member.requests import Turn
from gradserver.worker.splitting import SubgroupCalls

__all__ = ["Turn", "TurnCalls"]


class TurnCalls(SubgroupCalls):
    """The calls of a worker about rounds that it requests.

    In mode "bounded" or "async" (``gradserver serve --mode``) a round does not wait for all members. All members apply
    all rounds, in order. So replicas that have applied as many rounds are equal. For example:

        while batches_are_left():
            gradient = compute()                        # at version worker.round
            worker.request_round()
            while (turn := worker.next_turn()) is not Turn.DROP:
                pushes = turn is Turn.PUSH
                worker.push(0, gradient if pushes else result, weight=float(pushes))
                worker.finish_round()
                step()
                if pushes:
                    break

    `gradserver.DistributedDataParallel` and `gradserver.Job` do this.
    """

    @property
    def mode(self) -> str:
        """Mode of the group's rounds: "sync", "bounded" or "async"."""
        return self._session.membership.mode

    @property
    def staleness(self) -> int:
        """Number of updates that this worker's last contribution was late by, from its `Turn.PUSH` on.

        That is its round, less the number of rounds that were applied when it was computed.
        """
        return self._session.member.requests.staleness

    @property
    def damping(self) -> float:
        """Factor for this worker's contribution, at its `Turn.PUSH`.

        It is 1 / (1 + staleness) with ``--damping inverse`` (Zhang et al., 2016), and else 1.
        """
        return self._session.member.requests.damping

    @property
    def turn_of(self) -> int:
        """Number of the agreement that the present round is of, from `next_turn` on (`Worker.agree_beside`)."""
        return self._session.member.requests.section

    def request_round(
        self,
        follows: bool = False,
        *,
        of: Agreement | None = None,
        version: int | None = None,
        later: Sequence[Agreement] = (),
    ) -> None:
        """Request a round for a contribution. It returns at once.

        Args:
            follows: true if this worker has no data any more. It takes part in the others' rounds without any, until no
                member has any: then `next_turn` returns `Turn.PUSH`, and all contribute with weight 0.
            of: the agreement that the contribution is to. It is needed if this worker has several.
            version: value of ``worker.round`` when the contribution was computed; None for the present one.
            later: agreements with further contributions of the same version, for which rounds are requested afterwards.
                All workers have them in the order of their numbers.

        Raises:
            UsageError: the mode is "sync", or this worker has several agreements, and ``of`` names none.
            OutOfStepError: an earlier request is open.
        """
        numbers = tuple(one.number for one in later)
        self._session.boundaries.request_round(follows, None if of is None else of.number, version, numbers)

    def next_turn(self, timeout: Timeout = None) -> Turn:
        """Wait for the answer to the request, or for the results of the present round.

        Returns:
            `Turn.APPLY`: the present round has this worker's contribution not in it. Push all buckets of the agreement
            `turn_of` with weight 0, which sends nothing, finish the round, apply the results, and call this again.
            `Turn.PUSH`: push the contribution, times `damping`, and finish the round; the request is over.
            `Turn.DROP`: the contribution is too old, and the request is over.

        Raises:
            DeadlineError: neither has come in time. A further call waits on.
            OutOfStepError: there is no request, or the present round is not finished.
            GradServerError: the group goes no further.
        """
        return self._session.boundaries.next_turn(seconds(timeout))
