"""The page at `/docs`: the OpenAPI document in words, without scripts. Routed to by `server/http/app.py`."""

import html
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.http.page import content_security_policy

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; border-top: 1px solid #8884; padding-top: 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; padding: .7rem 1rem; border: 1px solid #8884; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td { border-top: 1px solid #8883; padding: .2rem .8rem .2rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


class DocsPage:
    """Its bytes, made once."""

    def __init__(self, document: dict[str, Any]):
        self._content = render(document)
        self._headers = {"Content-Security-Policy": content_security_policy(self._content), "X-Content-Type-Options": "nosniff"}

    async def show(self, request: Request) -> Response:
        return Response(self._content, headers=self._headers, media_type="text/html; charset=utf-8")


def render(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [
        _operation(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = html.escape(f"{document['info']['title']}, {document['info']['version']}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    intro = f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a>. <a href="./">Try the model</a>.</p>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{intro}{"".join(parts)}</body></html>'


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    said = f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
    if "requestBody" not in operation:
        return said
    content = operation["requestBody"]["content"]["application/json"]
    example = json.dumps(content["examples"]["example"]["value"])
    command = f"curl http://127.0.0.1:8000{path} -H 'Content-Type: application/json' -d '{example}'"
    said += f"<pre>{html.escape(command)}</pre>"
    for reference in content["schema"].get("anyOf", [content["schema"]]):
        schema = schemas[reference["$ref"].rpartition("/")[2]]
        required = schema.get("required", [])
        rows = (
            f"<tr><td><code>{html.escape(name)}</code>{' (required)' if name in required else ''}<td>{html.escape(_kind(value))}"
            for name, value in schema["properties"].items()
        )
        said += f"<details><summary>Fields</summary><table>{''.join(rows)}</table></details>"
    return said


def _kind(schema: dict[str, Any]) -> str:
    """A few words for what a value may be."""
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return " or ".join(dict.fromkeys(_kind(inner) for inner in schema[name]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
