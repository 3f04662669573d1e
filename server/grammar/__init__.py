"""Grammars of answers: from the fields of a request (`request.py`, in the api), and with tool calls (`answer.py`, in the processor)."""
