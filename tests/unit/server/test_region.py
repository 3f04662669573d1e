"""Regions that grow while they are filled."""

from engine.arena import Arena, create_memfd
from server.region import MIN_GROWTH, Region


def test_what_fits_is_had_although_twice_as_much_does_not() -> None:
    """Red if a body is turned away because the room that growing takes ahead does not fit."""
    size = 8 * MIN_GROWTH
    arena = Arena(create_memfd("test", size), size)
    region = Region(arena, 2 * MIN_GROWTH)
    region.append(b"x" * region.capacity)
    neighbour = arena.alloc(5 * MIN_GROWTH // 2)  # 3.5 units remain: less than twice the region, more than it needs
    region.append(b"y")
    assert bytes(region.view[-2:]) == b"xy" and region.used == 2 * MIN_GROWTH + 1
    region.free()
    arena.free(neighbour)
    arena.check()
    assert arena.is_empty()
