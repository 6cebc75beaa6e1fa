"""Rights of strangers: which groups they may found, and whether their data shards are taken."""

from __future__ import annotations

import hmac
from typing import NamedTuple

from gradserver.protocol.errors import JoinRefusedError
from gradserver.protocol.limits import PROBE_GROUP

_NAMED = 8
"""Groups that an error lists at most."""


class Access(NamedTuple):
    """Rights to found a group and to offer a data shard.

    Attributes:
        groups: the names under which groups may be founded; None for any. `PROBE_GROUP` is always one of them.
        shard_token: what a data shard shows that this coordinator has started itself; empty if there are none such.
        any_shard: whether others are taken, too.
    """

    groups: frozenset[str] | None = None
    shard_token: str = ""
    any_shard: bool = True

    def check_group(self, name: str) -> None:
        """JoinRefusedError if no group may be founded under ``name``."""
        if self.groups is None or name in self.groups or name == PROBE_GROUP:
            return
        allowed = sorted(self.groups)
        listed = ", ".join(repr(one) for one in allowed[:_NAMED]) + ", …" * (len(allowed) > _NAMED)
        raise JoinRefusedError(
            f"this coordinator serves {'group' if len(allowed) == 1 else 'groups'} {listed}, and no group {name!r}: "
            f"join one of these, or start it with `gradserver serve --groups NAME,…` (`--groups any` for any name)"
        )

    def is_own_shard(self, token: str) -> bool:
        """Tell whether a data shard that shows ``token`` was started by this coordinator."""
        return bool(self.shard_token) and hmac.compare_digest(token.encode(), self.shard_token.encode())

    def check_shard(self, url: str, token: str) -> None:
        """JoinRefusedError if the data shard at ``url``, which shows ``token``, is not to be taken."""
        if not self.any_shard and not self.is_own_shard(token):
            raise JoinRefusedError(
                f"this coordinator takes no data shards but those that it starts itself, and {url} is none of them: "
                f"start the coordinator with `gradserver serve --allow-shards` to take those of `serve --join`"
            )


OPEN = Access()
"""All rights for all peers."""
