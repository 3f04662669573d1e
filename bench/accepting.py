"""Engine whose drafts are accepted with a given probability, with any weights: `python -m bench.accepting P K --model ... --draft lookup`,
or `--draft mtp` or `eagle3`, whose head computes its usual drafts, at most three, which are then replaced.

The first answer to a prompt is greedy, without drafts, and kept. Later each draft is the recorded token with probability P, otherwise
a wrong one. Every step has K drafts per row; with K = 0 the engine adapts as usual, with BELIEVED as each draft's probability.
"""

import random
import sys
from collections.abc import Sequence

import engine.scheduler.main
from bench.processes import serve_with
from engine.scheduler.core import Proposer
from engine.scheduler.drafts.drafter import Offer, Proposal, Trust
from engine.scheduler.drafts.lookup import LookupDrafter, Source
from engine.scheduler.request import Request
from engine.scheduler.state import State
from engine.wire.config import MAX_HEAD_DRAFTS

BELIEVED = 0.9


class AcceptingSource(Source):
    def __init__(self, request: Request, answer: Sequence[int], probability: float, num_drafts: int):
        super().__init__(request)
        self._of, self._answer, self._probability, self._num_drafts = request, answer, probability, num_drafts
        self._rng = random.Random(request.rid)

    def _find(self, most: int) -> Proposal:
        if self._num_drafts:
            self.trust = Trust(hits=2.0, num_known=self._of.num_known)
        start, share = self._of.num_known - self._of.num_prompt, 1.0 if self._num_drafts else BELIEVED
        count = min(most, self._of.num_sampled + self._num_drafts) if self._num_drafts else most
        wrong = (self._rng.random() >= self._probability for _ in range(count))
        return [(token ^ is_wrong, share) for token, is_wrong in zip(self._answer[start : start + count], wrong, strict=False)]


class AcceptingDrafter(LookupDrafter):
    def __init__(self, verify_rows: int, probability: float, num_drafts: int, has_head: bool = False):
        super().__init__(verify_rows)
        self._probability, self._num_drafts, self._has_head = probability, num_drafts, has_head
        self._answers: dict[bytes, list[int]] = {}

    def offer(self, state: State) -> None:
        for request in state.running:
            if request not in self._sources:
                answer = self._answers.get(_prompt_of(request), [])
                self._sources[request] = AcceptingSource(request, answer, self._probability, self._num_drafts)
        super().offer(state)
        most = min(MAX_HEAD_DRAFTS, self._verify_rows // max(1, len(state.running)) - 1)
        state.num_proposed = max(0, min(most, self._num_drafts or MAX_HEAD_DRAFTS)) if self._has_head else 0

    def _offer(self, request: Request, most: int) -> Offer:
        return super()._offer(request, min(most, MAX_HEAD_DRAFTS) if self._has_head else most)

    def release(self, request: Request) -> None:
        self._answers.setdefault(_prompt_of(request), request.known_ids()[request.num_prompt :].tolist())
        super().release(request)


def _prompt_of(request: Request) -> bytes:
    return request.token_ids[: request.num_prompt].tobytes()


def main() -> int:
    """Entry point of the launcher, or of the scheduler, whose first argument is a file."""
    if not sys.argv[1].endswith(".json"):
        return serve_with("engine.scheduler.main", "bench.accepting", sys.argv[1:3], sys.argv[3:])
    probability, num_drafts = float(sys.argv[2]), int(sys.argv[3])

    def make(name: str, verify_rows: int) -> Proposer:
        return AcceptingDrafter(verify_rows, probability, num_drafts, has_head=name != "lookup")

    engine.scheduler.main.make_drafter = make
    engine.scheduler.main.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
