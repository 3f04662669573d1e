"""Formats that send an answer as a sequence of blocks in named events."""

from abc import abstractmethod

from engine.wire.messages import Event
from server.api.http.streaming import Call, Choice, Format, encode


class BlockFormat(Format):
    """Format of one choice as a sequence of blocks, of the kinds of `Choice.blocks`."""

    _open = ""  # kind of the block that deltas go to

    @abstractmethod
    def begin(self, call: Call | None) -> bytes: ...

    @abstractmethod
    def stop(self, status: str) -> bytes: ...

    @abstractmethod
    def delta(self, piece: str) -> bytes:
        """Return a piece of the open block."""

    @abstractmethod
    def finish_chunk(self, choice: Choice, extra: dict[str, object]) -> bytes: ...

    def token_chunk(self, choice: Choice, event: Event, extra: dict[str, object]) -> bytes:
        chunks = []
        if event.text:
            kind = "thinking" if event.is_reasoning else "text"
            if self._open != kind:
                chunks.append(self._begin(kind, None))
            chunks.append(self.delta(event.text))
        for piece in event.calls:
            if piece.name is not None:
                chunks.append(self._begin("call", choice.calls[piece.index]))
            if piece.arguments:
                chunks.append(self.delta(piece.arguments))
        if choice.finish_reason is not None:
            chunks.append(self.finish_chunk(choice, extra))
        return b"".join(chunks)

    def _begin(self, kind: str, call: Call | None) -> bytes:
        chunk = self._stop()
        self._open = kind
        return chunk + self.begin(call)

    def _stop(self, status: str = "completed") -> bytes:
        chunk = self.stop(status) if self._open else b""
        self._open = ""
        return chunk


def named_event(name: str, /, **fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}) + b"\n\n"
