"""OpenTelemetry tracing: one span per request, sent by OTLP over HTTP. Needs the extra `tracing`."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.types import ASGIApp

from engine.wire.config import VERSION


def traced(app: ASGIApp, endpoint: str) -> ASGIApp:
    """Return the traced application, without spans for single ASGI messages, which are tokens."""
    resource = Resource.create({"service.name": "mini-vlm-engine", "service.version": VERSION})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    middleware: ASGIApp = OpenTelemetryMiddleware(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    return middleware
