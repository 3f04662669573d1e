"""Invariants of arenas."""

from engine.wire.arena import Arena


def check_arena(arena: Arena) -> None:
    """Regions and free ranges cover the arena without overlap; no two free ranges touch."""
    cursor = arena.start
    for start, end in sorted([*arena._allocated.items(), *zip(arena._free_starts, arena._free_ends, strict=True)]):
        assert start == cursor and end > start, f"hole or overlap at {start}, expected {cursor}"
        cursor = end
    assert cursor == arena.size
    assert all(end < start for end, start in zip(arena._free_ends, arena._free_starts[1:], strict=False)), "two free ranges touch"
