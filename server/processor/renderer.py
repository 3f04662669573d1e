"""A process that renders the chat templates of requests: `python -m server.processor.renderer SETTING`. It answers each ChatPrompt with an
Answer.

Each is rendered in a child of its own: nothing of a template stays.
"""

import os
import resource
import signal
import sys

import msgspec

from engine.helper import ChildStopped, answer_in_child, answer_questions
from engine.ipc import die_with_parent
from engine.messages import ErrorInfo
from engine.params import ChatPrompt
from server.errors import RequestError, overloaded
from server.processor.template import ChatTemplate, Rendered, Setting

NICENESS = 19  # streams go first
MEMORY_BYTES = 1 << 30  # beyond it a template fails
CPU_S = 2.0  # CPU time of one template


class Answer(msgspec.Struct, frozen=True):
    rendered: Rendered | None = None
    error: ErrorInfo | None = None


def main() -> None:
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setting = msgspec.json.decode(sys.argv[1], type=Setting)
    answer_questions(lambda question: answer(setting, msgspec.msgpack.decode(question, type=ChatPrompt)))


def answer(setting: Setting, prompt: ChatPrompt) -> bytes:
    def work() -> bytes:
        try:
            return msgspec.msgpack.encode(Answer(ChatTemplate(prompt.template, setting).render(prompt)))
        except RequestError as error:
            return msgspec.msgpack.encode(Answer(error=error.info))
        except (MemoryError, UnicodeError):
            return refusal("it makes a prompt that is too large, or no text")

    try:
        return answer_in_child(work, CPU_S)
    except ChildStopped:
        return msgspec.msgpack.encode(Answer(error=interrupted().info))
    except (TimeoutError, EOFError):
        return refusal(f"it exceeds the limit of {CPU_S:.0f} s CPU time, or takes too much memory")


def interrupted() -> RequestError:
    return overloaded("chat_template: rendering was interrupted because the server is busy")


def refusal(words: str) -> bytes:
    return msgspec.msgpack.encode(Answer(error=RequestError(400, f"chat_template: {words}", "chat_template", "invalid_value").info))


if __name__ == "__main__":
    main()
