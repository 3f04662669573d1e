"""The engine in a Python program: `from engine.llm import LLM, SamplingParams`. Requests go to an ordinary server on a Unix socket."""

from engine.llm.client import LLM, AsyncLLM
from engine.llm.inputs import SamplingParams, StructuredOutputsParams
from engine.llm.outputs import CompletionOutput, EmbeddingOutput, RequestOutput

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EmbeddingOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
