"""Grammars of answers, compiled by separate processes and matched by rank 0.

processor ──Grammar──▶ compiler (a child, may be ended at any time) ──▶ bytes ──▶ arena ──▶ rank 0: matcher, token masks
"""
