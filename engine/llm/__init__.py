"""The engine within a Python program: `from engine.llm import LLM, SamplingParams`. The processes and the answers are those of HTTP."""

from engine.llm.blocking import LLM
from engine.llm.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from engine.llm.params import SamplingParams, StructuredOutputsParams
from engine.llm.streaming import AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
