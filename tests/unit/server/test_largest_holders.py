"""Who loses what it holds when all hold too much: the largest one of the address that holds most, at a cost that is nearly linear."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.http.shares import largest_holders

HOLDERS = st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), st.integers(1, 50), max_size=20)


class Counting(dict[tuple[str, int], int]):
    """Amounts that count how often they are looked at."""

    num_looks = 0

    def __getitem__(self, key: tuple[str, int]) -> int:
        self.num_looks += 1
        return super().__getitem__(key)


def address_of(holder: tuple[str, int]) -> str:
    return holder[0]


@given(HOLDERS, st.integers(0, 300))
def test_the_address_that_holds_most_loses_its_largest(held: dict[tuple[str, int], int], limit: int) -> None:
    left = dict(held)
    for holder in largest_holders(held, address_of, limit):
        totals: Counter[str] = Counter()
        for one, amount in left.items():
            totals[one[0]] += amount
        assert totals.total() > limit
        assert totals[holder[0]] == max(totals.values())
        assert left[holder] == max(amount for one, amount in left.items() if one[0] == holder[0])
        del left[holder]
    assert sum(left.values()) <= limit


def test_many_holders_cost_little() -> None:
    """Each connection that was closed took a look at all others, once a second, on the event loop."""
    num_holders = 4000
    held = Counting({(str(i % 100), i): 1000 + i for i in range(num_holders)})
    assert len(largest_holders(held, address_of, 0)) == num_holders
    assert held.num_looks <= 2 * num_holders * math.log2(num_holders)
