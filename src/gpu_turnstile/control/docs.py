"""`/docs`: the API on one page that needs no network, no script and no build: it is made from `/openapi.json`.

FastAPI's own page loads its program from elsewhere, which a machine without internet, or a careful one, cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "code,pre{font-family:ui-monospace,monospace;font-size:.9em}"
    "section{border-top:1px solid #ccc;padding:.5rem 0}h3{margin:.5rem 0}"
    ".verb{display:inline-block;min-width:4rem;font-weight:bold}td,th{text-align:left;padding:0 1rem 0 0}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8bf}section{border-color:#444}}"
)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse("".join(page(request.app.openapi())))


def page(spec: dict[str, Any]) -> Iterator[str]:
    """The page of an OpenAPI document."""
    info = spec["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1>{_prose(info['description'])}"
    yield '<p>For programs: <a href="openapi.json">openapi.json</a></p>'
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            yield from _operation(path, method, operation)
    yield "<h2>Shapes</h2>"
    for name, schema in spec.get("components", {}).get("schemas", {}).items():
        yield from _schema(name, schema)
    yield "</html>"


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f'<section><h3><span class="verb">{method.upper()}</span> <code>{escape(path)}</code></h3>'
    yield f"<p><b>{escape(operation['summary'])}</b></p>{_prose(operation.get('description', ''))}"
    rows = [(p["name"], p["in"], p.get("description", "")) for p in operation.get("parameters", ())]
    yield _table(rows)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        yield f"<p>Body: {_type(body)}</p>{_fields(body)}"
    for status, answer in operation["responses"].items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema")
        kind = _type(schema) if schema else ", ".join(map(escape, answer.get("content", {})))
        yield f"<div><code>{escape(status)}</code> {escape(answer['description'])} {kind}</div>"
    yield "</section>"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(name)}"><h3><code>{escape(name)}</code></h3>'
    yield _prose(schema.get("description", ""))
    if "enum" in schema:
        yield f"<p>{escape(', '.join(map(str, schema['enum'])))}</p>"
    yield f"{_fields(schema)}</section>"


def _fields(schema: dict[str, Any]) -> str:
    return _table((n, _type(p), p.get("description", "")) for n, p in schema.get("properties", {}).items())


def _table(rows: Any) -> str:
    """Rows of (name, type as HTML, text)."""
    cells = (f"<tr><td><code>{escape(n)}</code><td>{kind}<td>{escape(text)}" for n, kind, text in rows)
    inside = "".join(cells)
    return f"<table>{inside}</table>" if inside else ""


def _type(schema: dict[str, Any]) -> str:
    """A type as a person reads it, with links to shapes."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("const") or schema.get("type", "anything")))


def _prose(text: str) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part.strip())
