"""Errors for clients: one exception that carries an OpenAI error object."""

import functools
import logging

import msgspec

from engine.wire.arena import ArenaFull, ArenaTooSmall
from engine.wire.messages import ErrorInfo

logger = logging.getLogger(__name__)

PROMPT = "messages"  # `param` of errors of a prompt, until `Request.error_of` replaces it by the dialect's field


class RequestError(ValueError):
    """Error with the status and message for the client, which never contains a path or address."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.info = ErrorInfo(status, message, param=param, code=code, retry_after=retry_after)

    @classmethod
    def of(cls, info: ErrorInfo) -> "RequestError":
        error = cls(info.status, info.message)
        error.info = info
        return error


invalid_image = functools.partial(RequestError, 422, code="invalid_image")


INTERNAL_ERROR = ErrorInfo(500, "The server failed to handle this request.", code="internal_error")
ABORTED = ErrorInfo(503, "The engine aborted this request.", code="aborted", retry_after=1)


def overloaded(message: str, retry_after: int = 1) -> RequestError:
    """Return HTTP 503 with `Retry-After`: the same request may succeed later."""
    return RequestError(503, message, code="overloaded", retry_after=retry_after)


def error_of(failure: BaseException) -> ErrorInfo:
    """Return the error for the client of a request that failed; log an exception that is no error of the client."""
    if isinstance(failure, RequestError):
        return failure.info
    if isinstance(failure, ArenaFull):
        return overloaded("The server's media memory is full right now.").info
    if isinstance(failure, ArenaTooSmall):
        return ErrorInfo(413, "The media of this request exceed half of --processor-arena-bytes.")
    logger.error("a request failed", exc_info=failure)
    return INTERNAL_ERROR


def forget_frames(failure: BaseException) -> None:
    """Remove the stack from an error that has been reported, and from its causes. Its frames refer to tasks that refer to it, so megabytes
    of a rejected request would wait for the garbage collector."""
    failures: list[BaseException | None] = [failure]
    while failures:
        error = failures.pop()
        if error is not None:
            failures += error.__cause__, error.__context__, *(error.exceptions if isinstance(error, BaseExceptionGroup) else ())
            error.__cause__ = error.__context__ = error.__traceback__ = None


def error_body(info: ErrorInfo) -> bytes:
    error = {"message": info.message, "type": info.type, "param": info.param, "code": info.code}
    return msgspec.json.encode({"error": error})
