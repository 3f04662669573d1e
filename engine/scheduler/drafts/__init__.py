"""Drafters: `drafter.py` has the shared code; each other module has one drafter."""

import logging
from collections.abc import Callable

from engine.scheduler.core import Proposer
from engine.scheduler.drafts.lookup import LookupDrafter
from engine.scheduler.drafts.mtp import HeadDrafter

logger = logging.getLogger(__name__)

DRAFTERS: dict[str, Callable[[int], Proposer]] = {"lookup": LookupDrafter, "mtp": HeadDrafter, "eagle3": HeadDrafter}


def make_drafter(name: str, verify_rows: int) -> Proposer | None:
    """Return the drafter of `--draft`. `verify_rows`: query rows that a step of the backend can verify; 0 disables drafts."""
    if name != "off" and not verify_rows:
        logger.warning("--draft %s has no effect: this backend cannot verify draft tokens", name)
    return DRAFTERS[name](verify_rows) if name != "off" and verify_rows else None
