"""The ASGI application: its paths, and the middleware in front of them."""

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from ladder_jax import __version__
from ladder_jax.decode.engine import QueueFull
from ladder_jax.errors import UserError, unknown
from ladder_jax.serve import chat, completions, hosts, validation
from ladder_jax.serve.auth import authorised
from ladder_jax.serve.limits import limited
from ladder_jax.serve.refusal import Refusal, json_response
from ladder_jax.serve.service import Service

GENERATE = (completions.PATH, chat.PATH)
PATHS = (*GENERATE, "/health", "/metrics", "/v1/models", "/openapi.json")


def create(service: Service) -> ASGIApp:
    # Without the documentation pages, which load scripts from other hosts; /openapi.json describes the paths.
    api = fastapi.FastAPI(title="ladder-jax serve", version=__version__, docs_url=None, redoc_url=None)
    api.include_router(completions.router(service))
    api.include_router(chat.router(service))
    api.include_router(_about(service))
    for kind in (Refusal, RequestValidationError, HTTPException, UserError, Exception):
        api.add_exception_handler(kind, lambda http, error: _refusal(http, error).response())
    app = limited(api, limits=service.limits)
    app = service.drain.guard(app, paths=GENERATE)
    app = authorised(app, key=service.key)
    app = hosts.restricted(app, hosts=service.hosts)
    return service.metrics.count(app, paths=PATHS)


def _refusal(http: fastapi.Request, error: Exception) -> Refusal:
    """The error response for an exception. An unexpected one is a 500, and its traceback goes to the log."""
    match error:
        case Refusal():
            return error
        case RequestValidationError():
            return validation.refusal(error.errors())
        case HTTPException(status_code=404):
            return Refusal(404, str(unknown("path", http.url.path, PATHS)))
        case HTTPException(status_code=405):
            message = f"{http.method} is not for {http.url.path} (allowed: {(error.headers or {}).get('Allow')})"
            return Refusal(405, message, headers=error.headers)
        case HTTPException(status_code=400, __cause__=Refusal() as refusal):  # raised while reading the body
            return refusal
        case HTTPException(status_code=400):  # FastAPI's: the cause is the parser's error
            return Refusal(400, f"the body cannot be read as JSON: {error.__cause__ or error.detail}")
        case HTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        case QueueFull():
            return Refusal(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case UserError():
            return Refusal(400, str(error))
        case _:
            return Refusal(500, "an error in the server; its log says more")


def _about(service: Service) -> fastapi.APIRouter:
    routes = fastapi.APIRouter()
    model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "ladder_jax"}

    @routes.get("/health")
    @routes.head("/health", include_in_schema=False)  # load balancers ask with HEAD
    async def health() -> Response:
        if service.engine.error:
            return json_response({"status": "failed"}, status=503)
        if service.drain.draining:
            return json_response({"status": "draining"}, status=503)
        return json_response({"status": "ok"})

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.name:
            message = f"there is no model {name!r}; this server has {service.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return json_response(model)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return service.metrics.response()

    return routes
