"""Scripts of what may happen to a group, and their speed: ``python -m tests.session_scripts [SECONDS] [SEED] [KIND]``.

A seed decides on the group, its program, and on all that is lost and joins. KIND is one of ``all``, ``direct``,
``fixed``, ``halts``, ``modes``, ``modules``, ``parts``, ``promotions``, ``slow``, ``splits`` and ``subgroups``. The
figures are of one core.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial

from gradserver.engine.policy import Lateness, Policy
from gradserver.engine.records import Boundary, Entered, Epoch
from tests.crash_harness import Trap
from tests.direct_session_group import DirectGroup
from tests.fixed_session_group import FixedGroup
from tests.halting_session_group import HaltingGroup
from tests.mode_session_group import MODES, MeetingGroup, ModeGroup
from tests.session_group import COLLECTIVES, MAY_BE_LOST, Act, Group, LateGroup
from tests.session_world import real_code
from tests.slow_ways import SlowWays
from tests.subgroup_session_group import SubgroupGroup

RATES = ((1.0,), (1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0))
Happenings = dict[int, list[int]]
"""Members, connections or shards to which something happens, by step."""
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


def script_of_direct_rounds(seed: int) -> DirectGroup:
    """Make a group of members that reduce most rounds among themselves."""
    chance = random.Random(seed)
    modules = [[chance.randint(1, 40) for _ in range(chance.randint(1, 3))] for _ in range(chance.choice((1, 1, 2)))]
    acts = [_act(chance, len(modules), 0.85) for _ in range(chance.randint(4, 10))]
    program = [act._replace(direct=act.kind == "round" and chance.random() < 0.85) for act in acts]
    fuses = [chance.randint(0, 80) for _ in range(chance.randint(0, 4))]
    where = chance.choice(RATES), fuses, None, chance.choice((0.0, 0.0, 0.05)), chance.choice((0.0, 0.1, 0.3))
    group = DirectGroup(chance.randint(1, 4), modules, program, seed, *where)
    happenings = (group.break_line, group.break_line, group.kill, group.kill, group.join, group.world.kill_any_shard)
    for _ in range(chance.randint(0, 6)):
        what = partial(chance.choice(happenings), chance.randint(0, 3))
        group.world.at[chance.randint(0, STEPS)].append(what)
    return group


def script_of_halts(seed: int) -> HaltingGroup:
    """Make a group with data shards that is to halt, and lose some of it, often just when a shard has found out why."""
    chance = random.Random(seed)
    modules = [[chance.randint(1, 40) for _ in range(chance.randint(1, 3))] for _ in range(chance.choice((1, 1, 2)))]
    program = [Act(), *(_act(chance, len(modules), 0.8) for _ in range(chance.randint(2, 6)))]
    fuses, preemption = [chance.randint(0, 80) for _ in range(chance.randint(0, 2))], chance.choice((0.0, 0.0, 0.05))
    rates = chance.choice([one for one in RATES if len(one) > 1])
    group = HaltingGroup(chance.randint(2, 4), modules, program, seed, rates, fuses, preemption=preemption)
    number = chance.randrange(group.rounds)
    at, size = program[group.place_of_round(number)].section, len(group.buckets)
    parts = range(size)[sum(map(len, modules[:at])) :][: len(modules[at])]
    group.bad = chance.randrange(group.size), number, chance.choice(parts)
    losses = (group.break_line, group.kill, group.kill_bad, group.world.kill_any_shard, group.world.lose_soon)
    some = [partial(chance.choice(losses), chance.randint(0, 3)) for _ in range(chance.randint(1, 3))]
    group.world.at[1].append(partial(group.lose_behind_halt, *some, delay=chance.randint(0, 9)))
    for _ in range(chance.randint(0, 3)):
        what = partial(chance.choice((*losses[:2], group.join, losses[3])), chance.randint(0, 3))
        group.world.at[chance.randint(0, 350)].append(what)
    return group


def script_of_fixed_groups(seed: int) -> FixedGroup:
    """Make a group that needs all its members, and lose all else, and members, too, if ``seed`` is odd."""
    chance = random.Random(seed)
    modules = [[chance.randint(1, 40) for _ in range(chance.randint(1, 3))] for _ in range(chance.choice((1, 1, 2)))]
    program = [_act(chance, len(modules)) for _ in range(chance.randint(4, 10))]
    where = seed, chance.choice(RATES), [chance.randint(0, 80) for _ in range(chance.randint(0, 4))]
    size = chance.randint(1, 4)
    group = FixedGroup(size, modules, program, *where, policy=size, preemption=chance.choice((0.0, 0.0, 0.05)))
    happenings = [group.break_line, group.break_line, group.world.kill_any_shard]
    happenings += [group.kill] * (seed % 2)
    for _ in range(chance.randint(0, 6)):
        what = partial(chance.choice(happenings), chance.randint(0, 3))
        group.world.at[chance.randint(0, STEPS)].append(what)
    return group


def script_of_subgroups(seed: int) -> SubgroupGroup:
    """Make a group with a sub-group for each set of members, and lose all but members."""
    chance = random.Random(seed)
    kinds = (Act("round", 0), Act("round", 1), Act("sum", 1))
    acts = [chance.choice(kinds)._replace(root=chance.randint(0, 5)) for _ in range(chance.randint(2, 6))]
    program = [act._replace(numel=chance.randint(1, 40)) if act.kind == "sum" else act for act in acts]
    fuses = [chance.randint(0, 120) for _ in range(chance.randint(0, 4))]
    group = SubgroupGroup(
        chance.randint(1, 3), program, seed, chance.choice(RATES), fuses, chance.choice((0.0, 0.0, 0.05))
    )
    for _ in range(chance.randint(0, 4)):
        what = chance.choice((group.break_line, group.break_line, group.world.kill_any_shard))
        group.world.at[chance.randint(0, 600)].append(partial(what, chance.randint(0, 3)))
    return group


def script_of_splits(seed: int) -> SubgroupGroup:
    """Make such a group, and lose most while its sub-groups are made."""
    group = script_of_subgroups(seed)
    group.early = True
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


def script_of_promotions(seed: int) -> Group:
    """Make a group that workers join early, and lose most just behind what is written of them, or in a transfer.

    Some of these groups do not wait for all.
    """
    chance = random.Random(seed)
    modules = [[chance.randint(1, 40) for _ in range(chance.randint(1, 2))] for _ in range(chance.choice((1, 1, 2, 3)))]
    lateness = chance.choice((None, None, Lateness(quorum=1, keeps=True), Lateness(backup=1, grace=0.0)))
    program = [_act(chance, len(modules), 0.75 if lateness is None else 1.0) for _ in range(chance.randint(5, 9))]
    fuses = [chance.randint(0, 60) for _ in range(chance.randint(0, 1))]
    make, preemption = (Group, LateGroup)[lateness is not None], chance.choice((0.0, 0.0, 0.05))
    where = chance.choice(RATES), fuses, Policy(1, 8, lateness=lateness), preemption
    group = make(chance.randint(1, 3), modules, program, seed, *where)
    for _ in range(chance.randint(1, 2)):
        group.world.at[chance.randint(0, 60)].append(partial(group.join, chance.randint(0, 3)))
    kinds = (Boundary, Entered, Epoch)
    group.world.traps = [Trap(chance.choice(kinds), chance.randint(0, 9)) for _ in range(chance.randint(0, 4))]
    happenings = (group.break_line, group.kill, group.world.kill_any_shard, *[group.lose_in_transfer] * 3)
    for _ in range(chance.randint(0, 3)):
        what = partial(chance.choice(happenings), chance.randint(0, 3))
        group.world.at[chance.randint(0, 250)].append(what)
    group.world.along = [partial(group.kill, chance.randint(0, 3)) for _ in range(chance.choice((0, 0, 1)))]
    return group


def script_of_slow_ways(seed: int) -> Group:
    """Make one of the other groups, and have some of its messages be on their way for long."""
    kinds = (script_of_promotions, script_of_promotions, script, script_of_modules, script_of_direct_rounds)
    group = kinds[seed % len(kinds)](seed)
    group.world.ways = SlowWays(seed)
    return group


def script_of_modes(seed: int) -> ModeGroup:
    """Make a group with rounds that do not wait for all. If ``seed`` is even, members die and join, too."""
    return _script_of_modes(seed, lambda chance: [chance.randint(1, 40) for _ in range(chance.randint(1, 2))])


def script_of_modules(seed: int) -> ModeGroup:
    """Make such a group with several modules."""
    return _script_of_modes(
        seed,
        lambda chance: [
            [chance.randint(1, 24) for _ in range(chance.randint(1, 2))] for _ in range(chance.randint(2, 3))
        ],
    )


def _script_of_modes(seed: int, sizes_of: Callable[[random.Random], list[int] | list[list[int]]]) -> ModeGroup:
    chance = random.Random(seed)
    mode, sizes = chance.choice(MODES), sizes_of(chance)
    rates = chance.choice([(1.0,), (1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)])
    crashes, preemption = [chance.randint(0, 120) for _ in range(chance.randint(0, 4))], chance.choice((0.0, 0.0, 0.05))
    where = seed, rates, crashes, preemption
    group = ModeGroup(chance.randint(1, 4), sizes, chance.randint(1, 5), mode, *where)
    for _ in range(chance.randint(0, 3)):
        group.world.at[chance.randint(0, 800)].append(partial(group.break_line, chance.randint(0, 3)))
    for _ in range(chance.randint(0, 2)):
        what = chance.choice((group.kill, group.join)) if seed % 2 == 0 else group.world.kill_any_shard
        group.world.at[chance.randint(0, 600)].append(partial(what, chance.randint(0, 3)))
    return group


def script_of_full_disks(seed: int) -> ModeGroup:
    """Make a group with such rounds that loses its coordinator soon after its disk is full."""
    chance = random.Random(seed)
    mode, sizes = chance.choice(MODES), [chance.randint(1, 40) for _ in range(chance.randint(1, 2))]
    rates, preemption = chance.choice([(1.0,), (1.0, 1.0), (0.0, 1.0), (3.0, 0.5, 1.0)]), chance.choice((0.0, 0.05))
    group = ModeGroup(chance.randint(2, 4), sizes, chance.randint(2, 5), mode, seed, rates, (), preemption)
    for _ in range(chance.randint(1, 3)):
        step = chance.randint(20, 500)
        group.world.at[step].append(group.world.fill_disk)
        group.world.at[step + chance.randint(1, 60)].append(partial(group.world.lose_soon, chance.randint(0, 6)))
    return group


def script_of_meetings(seed: int) -> MeetingGroup:
    """Make a group with such rounds and collectives, that others join, at several data shards."""
    chance = random.Random(seed)
    rates, sizes = chance.choice([(1.0, 1.0), (1.0, 1.0, 1.0)]), [chance.randint(1, 40)]
    group = MeetingGroup(chance.randint(2, 3), sizes, chance.randint(3, 6), ("async", None, None), seed, rates)
    for _ in range(chance.randint(1, 2)):
        group.world.at[chance.randint(20, 400)].append(partial(group.join, 0))
    return group


def _act(chance: random.Random, modules: int, rounds: float = 0.6) -> Act:
    if chance.random() < rounds:
        return Act(section=chance.randrange(modules))
    return Act(chance.choice(sorted(COLLECTIVES)), chance.randint(1, 20), chance.randint(0, 3))


def check(group: Group) -> None:
    """Run a script, and check all laws."""
    group.run()
    group.check()
    group.check_entered()


def hold(group: Group, *planned: tuple[Happenings, Callable[[int], object]]) -> None:
    """Have each of these happen in its steps. Run the group then, and check all laws."""
    for happens, what in planned:
        for step, numbers in happens.items():
            group.world.at[step] += [partial(what, number) for number in numbers]
    check(group)


KINDS = {
    "all": script,
    "direct": script_of_direct_rounds,
    "fixed": script_of_fixed_groups,
    "halts": script_of_halts,
    "modes": script_of_modes,
    "modules": script_of_modules,
    "parts": script_of_parts,
    "promotions": script_of_promotions,
    "slow": script_of_slow_ways,
    "splits": script_of_splits,
    "subgroups": script_of_subgroups,
}


def main(seconds: float, seed: int, kind: str = "all") -> None:
    """Run scripts for so long, and show how many there were and what was lost in them."""
    groups = crashes = losses = rounds = 0
    began = time.perf_counter()
    with real_code():
        while (spent := time.perf_counter() - began) < seconds:
            group = KINDS[kind](seed + groups)
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
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0, *sys.argv[3:])
