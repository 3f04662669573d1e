"""`engine.llm`: the engine within a program gives the answers of its HTTP API and leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.launch.supervise import ChildDied
from engine.llm import LLM, AsyncLLM, SamplingParams
from models.demo.questions import questions
from tests.e2e.drawing import drawn
from tests.e2e.serving import ROOT, SMALL, Engine, is_alive
from tests.eventually import eventually

pytestmark = pytest.mark.e2e

FLAGS: dict[str, Any] = {name.removeprefix("--").replace("-", "_"): value for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


HELLO = user("Hello")


def ask(llm: LLM, chats: Any, params: SamplingParams = GREEDY, **options: Any) -> Any:
    return llm.chat(chats, params, **options)


def children() -> list[int]:
    """Return the engine processes that any thread of this process has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that ends meanwhile
            for child in (task / "children").read_text().split():
                if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def await_end(pids: list[int]) -> None:
    eventually(lambda: not any(is_alive(pid) for pid in pids), "the end of all processes")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    others = children()  # of other tests in this process
    with LLM(model="demo", **FLAGS) as one:
        pids = [pid for pid in children() if pid not in others]
        yield one
    await_end(pids)


@pytest.mark.gate
def test_answers_are_those_over_http(llm: LLM, demo: Engine) -> None:
    asked = list(islice(questions(31_000_001), 24))
    chats = [item.messages() for item in asked]
    outputs = ask(llm, chats)
    for chat, output in zip(chats, outputs, strict=True):
        answer = demo.client.post("/v1/chat/completions", json={"messages": chat, "temperature": 0, "max_tokens": 24}).json()
        (ours,), (choice,) = output.outputs, answer["choices"]
        assert (ours.text, ours.finish_reason, len(ours.token_ids)) == (
            choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"],
        )  # fmt: skip
        assert len(output.prompt_token_ids) == output.num_prompt_tokens
        assert output.num_prompt_tokens == answer["usage"]["prompt_tokens"] and output.finished
    body = {"prompt": "What number", "temperature": 0.9, "seed": 5, "n": 2, "logprobs": 1, "max_tokens": 6}
    over_http = demo.client.post("/v1/completions", json=body).json()["choices"]
    (output,) = llm.generate("What number", SamplingParams(temperature=0.9, seed=5, n=2, logprobs=1, max_tokens=6))
    assert [one.text for one in output.outputs] == [choice["text"] for choice in over_http]
    logprobs = output.outputs[1].logprobs
    assert logprobs and logprobs["token_logprobs"] == pytest.approx(over_http[1]["logprobs"]["token_logprobs"], abs=1e-4)
    vectors = demo.client.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
    for output_, entry in zip(llm.embed(["a", "b"]), vectors, strict=True):
        assert output_.outputs.embedding == pytest.approx(entry["embedding"], abs=1e-5)


@pytest.mark.gate
def test_lists_of_texts(llm: LLM) -> None:
    """Many share a request: a bad one fails alone, equal ones are sampled apart unless they have a seed."""
    prompts = ["Once", [1, 2, 3], "What number", "", *["Once"] * 40]
    outputs = llm.generate(prompts, GREEDY, errors="return")
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts[:3]]
    assert [output.outputs[0].token_ids for output in outputs[:3]] == [output.outputs[0].token_ids for output in alone]
    assert [output.prompt_token_ids for output in outputs[:3]] == [output.prompt_token_ids for output in alone]
    assert [output.num_prompt_tokens for output in outputs[:3]] == [output.num_prompt_tokens for output in alone] != [0] * 3
    assert isinstance(outputs[3].error, ValueError) and all(output.finished and not output.error for output in outputs[4:])
    chats = [*prompts[::2], HELLO, [{"role": "nobody"}]]
    together = llm.chat(chats, GREEDY, errors="return")
    alone = [llm.chat(chat, GREEDY)[0] for chat in chats[:-1]]
    assert [output.outputs[0].text for output in together[:-1]] == [output.outputs[0].text for output in alone]
    assert isinstance(together[-1].error, ValueError)
    for seed in (None, 7):
        random = llm.generate(["Once"] * 20, SamplingParams(seed=seed, temperature=2, max_tokens=8))
        assert (len({output.outputs[0].text for output in random}) > 1) == (seed is None)


@pytest.mark.gate
def test_pictures_as_programs_hold_them(llm: LLM, demo: Engine, tmp_path: Path) -> None:
    path = drawn(tmp_path)[0]
    image = Image.open(path)
    forms = [
        path, path.read_bytes(), image, image.convert("RGBA"), {"type": "image", "image": image},
        {"type": "image", "image": str(path)}, {"type": "image_url", "image_url": {"url": path}}, {"type": "image_url", "image_url": image},
    ]  # fmt: skip
    question = {"type": "text", "text": "What number is in picture 1?"}
    outputs = ask(llm, [user(form, question) for form in forms])
    assert [output.outputs[0].text for output in outputs] == ["472"] * len(forms)


@pytest.mark.gate
def test_a_bad_request_among_good_ones(llm: LLM) -> None:
    chats = [HELLO, user(b"no picture", "What is it?"), user(Path("/none.png"))]
    good, bad, missing = ask(llm, chats, errors="return")
    assert good.error is None and good.outputs[0].text and not bad.outputs
    assert isinstance(bad.error, ValueError) and "Image 1" in str(bad.error) and isinstance(missing.error, OSError)
    with pytest.raises(ValueError, match="Image 1"):
        ask(llm, chats[:2])
    with pytest.raises(ValueError, match="temperature"):
        ask(llm, HELLO, SamplingParams(temperature=-1))
    finished = dict(llm.as_completed(chats, GREEDY))
    assert finished[0].outputs[0].text == good.outputs[0].text and "Image 1" in str(finished[1].error) and finished[2].error
    for num_tokens in range(100, 105):  # a connection whose answer is abandoned is not used again: a request on it would wait for ever
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        assert next(llm.as_completed([HELLO, HELLO], params))[1].finished  # the other one is aborted
        assert ask(llm, HELLO, GREEDY)[0].finished


async def test_streams_and_a_death() -> None:
    others = set(children())
    endless = SamplingParams(ignore_eos=True, max_tokens=500)
    async with AsyncLLM(model="demo", max_num_seqs=2, max_queued_requests=2, **FLAGS) as one:
        texts = [output.outputs[0].text async for output in one.chat(HELLO, GREEDY)]
        assert len(texts) > 5 and all(later.startswith(earlier) for earlier, later in pairwise(texts))
        for _ in range(3):  # more than there are places
            stream = one.generate("Once", endless)
            await anext(stream)
            await stream.aclose()
        assert (await one.embed(HELLO)).num_prompt_tokens > 3
        pids = [pid for pid in children() if pid not in others]
        await anext(one.chat(HELLO, endless).__aiter__())
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises((ChildDied, ValueError)):
            while True:
                async for _output in one.chat(HELLO, endless):
                    pass
        with pytest.raises(ChildDied, match="was killed"):
            while True:  # requests may be refused until the engine has noticed the death
                with contextlib.suppress(ValueError):
                    await anext(one.chat(HELLO))
    await_end(pids)


def test_a_bad_flag_or_model_is_an_error_and_leaves_nothing() -> None:
    others = set(children())
    with pytest.raises(ValueError, match="unknown argument --max-num-seq"):
        LLM(max_num_seq=4)
    with pytest.raises(ValueError, match="neither a folder"):
        LLM(model="no-such-model", **FLAGS)
    with pytest.warns(UserWarning, match="without effect"), pytest.raises(ValueError, match="does not support --dp"):
        LLM(trust_remote_code=True, dp=2)
    await_end([pid for pid in children() if pid not in others])


PROGRAM = """
import os, signal
from engine.llm import LLM
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    llm = LLM(**{flags})
    {end}
except KeyboardInterrupt:
    pass
"""
ENDS = {
    "by itself": ("pass", 0),
    "by SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "by Ctrl-C": ("raise RuntimeError('it was not interrupted')", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_does_not_close(name: str) -> None:
    """Neither processes nor the run directory outlive it, nor a start that is interrupted, which prints nothing."""
    end, code = ENDS[name]
    with tempfile.TemporaryDirectory(prefix="llm-") as folder:
        command, environment = [sys.executable, "-c", PROGRAM.format(flags=FLAGS, end=end)], {**os.environ, "TMPDIR": folder}
        program = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        if name == "by Ctrl-C":
            eventually(lambda: program.poll() is not None or any(Path(folder).iterdir()), "the engine's start")
            program.send_signal(signal.SIGINT)
        _, said = program.communicate()
        assert (program.returncode, said) == (code, "")
        eventually(lambda: not any(Path(folder).iterdir()), "the removal of the run directory")
        processes = ["pgrep", "-f", folder]
        eventually(lambda: subprocess.run(processes, capture_output=True, check=False).returncode == 1, "the end of all processes")


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    paths = drawn(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"none")
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- captions -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    for _ in range(2):  # the second one finds nothing to do
        command = [sys.executable, "-c", found[1], tmp_path, "demo", tmp_path / "lines.json"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.json").read_text().splitlines()]
    assert sorted(line["file"] for line in lines) == sorted([*(path.name for path in paths), "broken.png"])
    assert all(("error" in line) == (line["file"] == "broken.png") for line in lines)
