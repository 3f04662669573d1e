"""Tokens proposed for running requests, which steps verify."""

from engine.scheduler.request import Request
from engine.scheduler.state import State


class Proposer:
    """Interface for the core. This class proposes no tokens; others override its methods."""

    def offer(self, state: State) -> None:
        """Before a plan: set `Request.proposed` where the results are complete, and hold back rows that should get some later."""

    def take(self, request: Request, proposed: list[int]) -> None:
        """Take the tokens that workers proposed before a request's newest ones."""

    def note(self, request: Request, num_accepted: int) -> None:
        """Record how many of a row's proposed tokens were accepted."""

    def release(self, request: Request) -> None:
        """Release the state of a request that has ended."""
