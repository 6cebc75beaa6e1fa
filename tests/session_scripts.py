"""Scripts of what may happen to a group, and how fast they run: ``python -m tests.session_scripts [SECONDS] [SEED]``.

A seed decides on the group, its program, and on all that is lost and joins. The figures are of one core.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial

from tests.session_group import COLLECTIVES, MAY_BE_LOST, Act, Group
from tests.session_world import real_code

RATES = ((1.0,), (1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0))
STEPS = 500
"""Steps in which something may happen."""


def script(seed: int) -> Group:
    """Make a group, and plan what happens to it."""
    chance = random.Random(seed)
    modules = [[chance.randint(1, 40) for _ in range(chance.randint(1, 3))] for _ in range(chance.choice((1, 1, 2)))]
    program = [_act(chance, len(modules)) for _ in range(chance.randint(4, 10))]
    fuses = [chance.randint(0, 80) for _ in range(chance.randint(0, 4))]
    preemption = chance.choice((0.0, 0.0, 0.05))
    group = Group(chance.randint(1, 4), modules, program, seed, chance.choice(RATES), fuses, preemption=preemption)
    happenings = (group.break_line, group.break_line, group.kill, group.join, group.world.kill_any_shard)
    for _ in range(chance.randint(0, 6)):
        what = partial(chance.choice(happenings), chance.randint(0, 3))
        group.world.at[chance.randint(0, STEPS)].append(what)
    return group


def script_of_parts(seed: int) -> Group:
    """Make a group with data shards that exchanges most often what is another's for each member."""
    chance = random.Random(seed)
    kinds = (*sorted(COLLECTIVES), *sorted(MAY_BE_LOST) * 6, *["round"] * 30)
    acts = [Act(chance.choice(kinds), chance.randint(1, 40), chance.randint(0, 3)) for _ in range(chance.randint(2, 7))]
    program = [act if act.kind != "round" else Act() for act in acts]
    fuses = [chance.randint(0, 60) for _ in range(chance.randint(0, 4))]
    rates = chance.choice(((1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)))
    sizes, preemption = [chance.randint(1, 20)], chance.choice((0.0, 0.0, 0.05))
    group = Group(chance.randint(2, 4), [sizes], [*program, Act()], seed, rates, fuses, preemption=preemption)
    happenings = (group.break_line, group.break_line, group.kill, group.world.kill_any_shard)
    for _ in range(chance.randint(0, 4)):
        what = partial(chance.choice(happenings), chance.randint(0, 3))
        group.world.at[chance.randint(0, 400)].append(what)
    return group


def _act(chance: random.Random, modules: int) -> Act:
    if chance.random() < 0.6:
        return Act(section=chance.randrange(modules))
    return Act(chance.choice(sorted(COLLECTIVES)), chance.randint(1, 20), chance.randint(0, 3))


def check(group: Group) -> None:
    """Run a script, and check all laws."""
    group.run()
    group.check()
    group.check_entered()


def main(seconds: float, seed: int) -> None:
    """Run scripts for so long, and show how many there were and what was lost in them."""
    groups = crashes = losses = rounds = 0
    began = time.perf_counter()
    with real_code():
        while (spent := time.perf_counter() - began) < seconds:
            group = script(seed + groups)
            try:
                check(group)
            except Exception:
                print(f"a law fails in script {seed + groups}", file=sys.stderr)
                raise
            groups, crashes, losses = groups + 1, crashes + len(group.world.crashes), losses + len(group.world.losses)
            rounds += group.rounds
    print(f"{groups} scripts in {spent:.0f} s, from seed {seed}; all laws held")
    print(f"{groups / spent:.1f} scripts/s, {rounds / spent:.0f} rounds/s, {crashes / spent:.1f} lost coordinators/s, ")
    print(f"{losses / spent:.1f} losses/s in all (coordinators, data shards, members, connections)")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
