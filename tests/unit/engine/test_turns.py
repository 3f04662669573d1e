"""Turns of clients that share a helper."""

from engine.helper import MAX_CLIENTS, Turns


async def test_what_is_remembered_of_clients_is_bounded() -> None:
    """A helper that was never idle remembered each client, and clients choose how many they are."""
    turns = Turns()
    async with turns.take(b"heavy", 1):
        pass
    turns._used[b"heavy"] = 10**6
    for number in range(3 * MAX_CLIENTS):
        turns._is_taken = False
        turns._pass_on = lambda: None  # type: ignore[method-assign]  # others always wait
        async with turns.take(b"%d" % number, 1):
            pass
    assert len(turns._used) <= MAX_CLIENTS
    assert turns._used[b"heavy"] == 10**6
