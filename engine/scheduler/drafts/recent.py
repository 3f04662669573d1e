"""Recent answers of each tenant, to guess others from: forms are filled in alike. No tenant ever sees what another one's hold, not even by
the time that a token takes."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.scheduler.drafts.suffixes import SuffixAutomaton

MAX_TENANTS = 64
MAX_TOKENS = 1 << 18  # of all tenants: beyond it, whoever asked longest ago loses all
GENERATION_TOKENS = 1 << 15  # then another automaton begins; of a tenant the last two are kept
MAX_QUEUED = 64  # answers that wait to be read: of more, the oldest are dropped


class RecentAnswers:
    """Bounded in tenants and tokens, and so in answers."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, deque[SuffixAutomaton]] = OrderedDict()  # the one used last is the last
        self._queue: deque[tuple[bytes, array[int]]] = deque(maxlen=MAX_QUEUED)
        self._position = 0  # in the first of the queue

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automata in self._tenants.values() for automaton in automata)

    def of(self, tenant: bytes) -> Sequence[SuffixAutomaton]:
        """They may grow, and others may replace them."""
        automata = self._tenants.get(tenant)
        if automata is None:
            return ()
        self._tenants.move_to_end(tenant)
        return automata

    def add(self, tenant: bytes, tokens: Sequence[int]) -> None:
        """An answer, with a few tokens before it; `read` makes it known. Without a tenant it is nobody's."""
        if tenant and tokens:
            if len(self._queue) == MAX_QUEUED:
                self._position = 0
            self._queue.append((tenant, array("i", tokens[-GENERATION_TOKENS:])))

    def read(self, num_tokens: int) -> bool:
        """At most so many tokens. False if nothing waits."""
        if not self._queue:
            return False
        tenant, tokens = self._queue[0]
        automaton = self._open(tenant, is_new=self._position == 0)
        automaton.extend(tokens[self._position : self._position + num_tokens])
        self._position += num_tokens
        if self._position >= len(tokens):
            automaton.end_text()
            self._queue.popleft()
            self._position = 0
        return True

    def forget(self) -> None:
        self._tenants.clear()
        self._queue.clear()
        self._position = 0

    def _open(self, tenant: bytes, is_new: bool) -> SuffixAutomaton:
        """Where the tenant's next tokens go; if an answer begins, with room for it."""
        automata = self._tenants.setdefault(tenant, deque(maxlen=2))
        self._tenants.move_to_end(tenant)
        if is_new:
            while len(self._tenants) > MAX_TENANTS or (self.num_tokens > MAX_TOKENS and len(self._tenants) > 1):
                self._tenants.popitem(last=False)
        if not automata or (is_new and automata[-1].num_tokens >= GENERATION_TOKENS):
            automata.append(SuffixAutomaton())
        elif is_new:
            automata[-1].end_text()  # of an answer that was dropped half read
        return automata[-1]
