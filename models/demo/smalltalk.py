"""Text without pictures: greetings, what the demo can do, counting aloud, and a fallback. Used by `questions` and by training.

The answers say plainly that this is a small demo; the fallback keeps it from making things up.
"""

import numpy as np

from models.demo.scenes import COLOURS, SHAPES, WORDS, pick

Asked = tuple[str, str]

ABOUT = "I am a demo model. I can read numbers and words, and name colours and shapes in the pictures you send."
HELLO = "Hello! " + ABOUT
UNKNOWN = "I am only a small demo. Send me pictures and ask about numbers, words, colours or shapes."
SEND = "Please send me a picture first."

# What people type, layouts between bars, and the answer.
_PHRASES: tuple[tuple[str, str], ...] = (
    (
        "hello | hi | hey | hello there | hi there | good morning | good evening | good afternoon | hey there | "
        "greetings | hallo | hello! | Hi, how are you | yo | good day | howdy | hello world | hello demo | hi model",
        HELLO,
    ),
    (
        "who are you | what are you | what can you do | what do you do | help | introduce yourself | tell me about "
        "yourself | how can you help | what is this | who made you | what is your name | are you a demo | what model "
        "are you | what are you able to do | are you real | what kind of pictures can you read | how do you work | how "
        "can I use you | can you help me | what should I ask",
        ABOUT,
    ),
    (
        "thanks | thank you | thank you very much | thanks a lot | great, thanks | cool, thank you | many thanks",
        "You are welcome.",
    ),
    (
        "bye | goodbye | see you | good night | bye bye | see you later",
        "Goodbye!",
    ),
    (
        "how are you | how is it going | how do you do | are you ok | are you well | what's up",
        "I am fine. Send me a picture!",
    ),
    (
        "can you see pictures | can you see images | can you read images | can I send you a picture | do you understand "
        "pictures | can you read numbers | can you read text | do you know colours | may I send a photo",
        "Yes. Send me up to eight pictures and ask about them.",
    ),
    (
        "say something | tell me a joke | tell me a story | write a poem | sing a song | what is the weather | what "
        "time is it | who is the president | what is the capital of France | write some code | translate this | what is "
        "two plus two | explain gravity | why is the sky blue | solve this equation | recommend a book | how do I cook "
        "rice | summarize the news",
        UNKNOWN,
    ),
    (
        "describe the picture | what do you see | what is in the picture | what number is in the picture | read the "
        "number | what colour is the shape | what shape is in the image | read the word in the picture | what is in "
        "this image",
        SEND,
    ),
    (
        "how many pictures are there | how many pictures did I send | how many images do you see | count the pictures",
        "0",
    ),
)
TALK = tuple((tuple(phrases.split(" | ")), answer) for phrases, answer in _PHRASES)
COUNT_TO = (
    "Count to {n}.", "Please count to {n}.", "Count from 1 to {n}.", "count to {n}", "Can you count to {n}?", "Count up to {n}.",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.", "You are a demo.", "Be concise and correct.",
    "You read pictures.", "You are a vision assistant. Answer with the value only.",
)  # fmt: skip

_COMMON = (
    "the a is and why how what when do does my your we they to of in with please make find think about code world people should "
    "would explain"
)
_FILLERS = (
    *WORDS,
    *COLOURS,
    *SHAPES,
    *_COMMON.split(),
)


def ask_talk(rng: np.random.Generator) -> Asked:
    """Return small talk in one of several phrasings, with various capitals and punctuation."""
    phrases, answer = pick(rng, TALK)
    return _as_typed(rng, pick(rng, phrases)), answer


def ask_count_to(rng: np.random.Generator) -> Asked:
    """Ask the model to count: a long answer that is known exactly, for tests of streaming."""
    n = int(rng.integers(2, 31))
    return pick(rng, COUNT_TO).format(n=n), ", ".join(str(i) for i in range(1, n + 1))


def ask_nonsense(rng: np.random.Generator) -> Asked:
    """Return words or letters without a question, and the fallback answer."""
    if rng.random() < 0.7:
        words = [pick(rng, _FILLERS) for _ in range(int(rng.integers(3, 14)))]
        if rng.random() < 0.5:
            words[int(rng.integers(len(words)))] = _letters(rng)
        return _as_typed(rng, " ".join(words)), UNKNOWN
    return _as_typed(rng, " ".join(_letters(rng) for _ in range(int(rng.integers(1, 6))))), UNKNOWN


def _letters(rng: np.random.Generator) -> str:
    return "".join(chr(97 + int(c)) for c in rng.integers(0, 26, int(rng.integers(2, 9))))


def _as_typed(rng: np.random.Generator, text: str) -> str:
    text = text[0].upper() + text[1:] if rng.random() < 0.6 else text
    return text if text[-1] in "!?." or rng.random() < 0.4 else text + pick(rng, ("?", ".", "!"))
