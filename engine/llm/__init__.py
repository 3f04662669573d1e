"""The engine in a Python program: `from engine.llm import LLM, SamplingParams`."""

from engine.llm.bodies import CompletionOutput, EmbeddingOutput, RequestOutput, SamplingParams
from engine.llm.client import LLM, AsyncLLM

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EmbeddingOutput", "RequestOutput", "SamplingParams"]
