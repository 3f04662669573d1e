"""Grammars that answers must follow: compiled by processes of their own, matched by rank 0.

processor ──Grammar──▶ compiler (a child, may be ended at any time) ──▶ bytes ──▶ arena ──▶ rank 0: matcher, token masks
"""
