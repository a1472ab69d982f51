"""`/openapi.json`: what is served here, written from the types that are used to read and to answer.

Which statuses an endpoint may answer with follows from what stands around it: one that needs a key may refuse
(401); one with a body adds 400, 408 and 413; one that needs the engine, 500 and 503.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from mainspring import __version__

if TYPE_CHECKING:
    from mainspring.server.routes import Entry

REFERENCE = "#/components/schemas/{name}"
MEANINGS = {
    400: "The request is wrong; the error names the field.",
    401: "A key is needed.",
    404: "There is no such model or response here.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    500: "The answer failed.",
    503: "Not now: the model is loading, too many wait, the server is ending, or the engine is gone.",
}


def document(served: Iterable[Entry], needs_key: bool) -> dict[str, Any]:
    """The whole document, as JSON values."""
    served = list(served)
    kinds = {kind for entry in served for kind in (entry.takes, *entry.gives) if kind is not None}
    kinds |= {entry.error for entry in served}
    schemas, components = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=REFERENCE
    )
    references = dict(zip(sorted(kinds, key=lambda kind: kind.__name__), schemas, strict=True))
    paths: dict[str, Any] = {}
    for entry in served:
        paths.setdefault(entry.path, {})[entry.method.lower()] = _operation(entry, references, needs_key)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mainspring", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return found


def _operation(entry: Entry, references: dict[Any, Any], needs_key: bool) -> dict[str, Any]:
    summary = (entry.endpoint.__doc__ or entry.endpoint.__name__.replace("_", " ")).strip().splitlines()[0]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{entry.method.lower()}{entry.path}").strip("_"),
        "summary": summary,
        "responses": {"200": _success(entry, references)},
    }
    for status in _failures(entry, needs_key):
        error = _json(references[entry.error])
        found["responses"][str(status)] = {"description": MEANINGS[status], "content": error}
    if entry.takes is not None:
        found["requestBody"] = {"required": True, "content": _json(references[entry.takes])}
    if "{" in entry.path:
        name = re.sub(r".*\{|\}.*", "", entry.path)
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if needs_key and entry.needs_key:
        found["security"] = [{"bearer": []}, {"key": []}]
    return found


def _success(entry: Entry, references: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if entry.gives:
        content |= _json(references[entry.gives[0]])
    if len(entry.gives) > 1:  # the second is what a stream is made of
        # of an event: its data, or where it has a name, an object of both
        schema = {"type": ["string", "object"]}
        content["text/event-stream"] = {"schema": schema, "x-event": references[entry.gives[1]]}
    if entry.gives_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": "The answer.", **({"content": content} if content else {})}


def _failures(entry: Entry, needs_key: bool) -> list[int]:
    found = set(entry.fails)
    if needs_key and entry.needs_key:
        found.add(401)
    if entry.takes is not None:
        found |= {400, 408, 413}
    if entry.is_work:
        found |= {404, 500, 503}
    return sorted(found)


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
