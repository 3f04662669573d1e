"""Grammars that answers must follow: compiled by a process of its own, which the processor starts at the first one; matched by rank 0.

    processor ──Grammar──▶ compiler (a child, may be ended at any time) ──▶ bytes ──▶ arena ──▶ rank 0: matcher, token masks
"""
