"""Read the body of an endpoint that is called often, without FastAPI's parameters.

These parse the type of the content, each header and the body again for every request, which takes
as long as the rest of the endpoint. The OpenAPI document and the errors are the same.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

import fastapi
import pydantic
from fastapi import exceptions

from queue_workflows.service.routes import parameters

B = TypeVar("B", bound=pydantic.BaseModel)
_REF: Final = "#/components/schemas/{model}"


def document(model: type[pydantic.BaseModel], *headers: dict[str, Any]) -> dict[str, Any]:
    """Return what the OpenAPI document says about an endpoint whose body `read` reads."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {
        "parameters": [*headers],
        "requestBody": {"required": True, "content": content},
    }


def schemas(*models: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the schemas of these bodies for the OpenAPI document, by name."""
    found: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
        found |= schema.pop("$defs", {})
        found[model.__name__] = schema
    return found


async def read(request: fastapi.Request, model: type[B]) -> B:
    """Return the body of a request.

    Raises `RequestValidationError` (422) for what is no such body, `HTTPException` (400) for what
    is no text in Unicode, or nests too deep.
    """
    text = await request.body()
    try:
        content = json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise exceptions.RequestValidationError(
            [{"loc": ("body", error.pos), "msg": f"JSON decode error: {error.msg}"}]
        ) from None
    except (ValueError, RecursionError):
        raise fastapi.HTTPException(400, "There was an error parsing the body") from None
    if content is None:
        raise exceptions.RequestValidationError([{"loc": ("body",), "msg": "Field required"}])
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise exceptions.RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in found]
        ) from None


def key_header(request: fastapi.Request) -> str | None:
    """Return the header Idempotency-Key; raise `RequestValidationError` for one that is none."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    try:
        return parameters.KEY.validate_python(given)
    except pydantic.ValidationError as error:
        raise exceptions.RequestValidationError(
            [
                {"loc": ("header", "idempotency-key"), "msg": fault["msg"]}
                for fault in error.errors(include_url=False)
            ]
        ) from None
