"""Drafters: `drafter.py` has the protocol and what all share; each other module is one of them."""

import logging
from collections.abc import Callable

from engine.scheduler.drafts.drafter import Drafter
from engine.scheduler.drafts.lookup import LookupDrafter
from engine.scheduler.drafts.mtp import HeadDrafter

logger = logging.getLogger(__name__)

DRAFTERS: dict[str, Callable[[int], Drafter]] = {"lookup": LookupDrafter, "mtp": HeadDrafter}


def make_drafter(name: str, verify_rows: int) -> Drafter | None:
    """The drafter of `--draft`. `verify_rows`: query rows that a step of the backend can verify; without any there are no drafts."""
    if name == "off":
        return None
    if not verify_rows:
        logger.warning("--draft %s: this backend cannot verify drafts, so there are none", name)
        return None
    return DRAFTERS[name](verify_rows)
