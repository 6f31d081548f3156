"""The arithmetic of the card's memory, in GB. It is told numbers and answers numbers; it measures nothing.

A footprint of 0 means *unknown*. Invariant: who is unknown is alone. It may have the whole card, it never shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

_ROUNDING = 1e-6  # GB; sums of decimal fractions are not exact
_EXACT = 12  # residents up to which every set is looked at (4,096 sets)


def capacity(limit: float, reserve: float) -> float:
    """What presets may use together: the card less its reserve (32 - 6 = 26 by the swap document's defaults)."""
    return max(0.0, limit - reserve)


def fits(footprints: Iterable[float], limit: float, reserve: float) -> bool:
    """Whether these can be on the card together. Alone, an unknown footprint gets the benefit of the doubt."""
    sizes = list(footprints)
    if len(sizes) > 1 and 0 in sizes:
        return False
    return sum(sizes) <= capacity(limit, reserve) + _ROUNDING


def plan_eviction(
    residents: Mapping[str, float],
    target: float,
    capacity: float,
    colocate: bool,
    costs: Mapping[str, float] | None = None,
) -> tuple[str, ...]:
    """Who must go before a tenant with the footprint `target` may come, in the order of `residents`.

    Without `colocate`: everybody. With it: the cheapest set that makes room. `costs` is what it takes to bring a
    resident back (any unit, the same for all); left out, a resident costs its footprint. Of equally cheap sets the
    smaller one goes. Whether the target fits at all is not asked here; one that never will empties the card.
    """
    everybody = tuple(residents)
    if not colocate or target <= 0 or target > capacity + _ROUNDING:
        return everybody
    unknown = {name for name in everybody if residents[name] <= 0}
    known = [name for name in everybody if name not in unknown]
    need = sum(residents[name] for name in known) + target - capacity - _ROUNDING
    price = residents if costs is None else costs
    cheapest = _cheapest(known, residents, price, need) | unknown
    return tuple(name for name in everybody if name in cheapest)


def _cheapest(names: Sequence[str], sizes: Mapping[str, float], price: Mapping[str, float], need: float) -> set[str]:
    """The cheapest subset of `names` that frees at least `need` GB."""
    if need <= 0:
        return set()
    if len(names) > _EXACT:
        return _cheap(names, sizes, price, need)
    enough = (
        group
        for count in range(1, len(names) + 1)
        for group in combinations(names, count)
        if sum(sizes[name] for name in group) >= need
    )
    return set(min(enough, key=lambda group: sum(price.get(name, 0.0) for name in group)))


def _cheap(names: Sequence[str], sizes: Mapping[str, float], price: Mapping[str, float], need: float) -> set[str]:
    """A good set in n log n, for more residents than can be tried in every combination.

    Take the cheapest per GB until there is room, then put back, dearest first, whoever turned out not to be needed.
    """
    chosen: list[str] = []
    freed = 0.0
    for name in sorted(names, key=lambda name: price.get(name, 0.0) / sizes[name]):
        if freed >= need:
            break
        chosen.append(name)
        freed += sizes[name]
    for name in sorted(chosen, key=lambda name: -price.get(name, 0.0)):
        if freed - sizes[name] >= need:
            chosen.remove(name)
            freed -= sizes[name]
    return set(chosen)
