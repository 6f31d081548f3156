"""What goes wrong in a control call, as JSON: `{"error": code, "message": sentence}` and `X-Turnstile-Error`.

The model listing is read by OpenAI's libraries, so its errors have their shape; everything else is plain.
"""

from __future__ import annotations

from math import ceil

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gpu_turnstile.core.model import Refuse
from gpu_turnstile.gateway.errors import Problem, body
from gpu_turnstile.gateway.paths import Dialect

_OPENAI_PATHS = ("/v1/models", "/models")
_CODES = {404: "not_found", 405: "method_not_allowed"}


class Refusal(Exception):
    """A control call that is answered with a problem."""

    def __init__(self, code: str, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(code, message, status, retry_after)


def from_scheduler(refusal: Refuse) -> Refusal:
    return Refusal(refusal.code, refusal.message, retry_after=refusal.retry_after)


def install(app: FastAPI) -> None:
    """Every error of `app` takes the gate's shape, also those nobody thought of."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        return answer(request, error.problem)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, "bad_request")
        text = {
            404: f"the gate has no {request.url.path}; GET /docs lists what it has",
            405: f"{request.method} is not possible on {request.url.path}; GET /docs lists what is",
        }.get(error.status_code, str(error.detail))
        reply = answer(request, Problem(code, text, error.status_code))
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return answer(request, Problem("bad_request", f"{where}: {first['msg']}", 400))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        message = "something in the gate failed that should not; its log says what. The data plane is not affected"
        return answer(request, Problem("internal", message, 500))


def answer(request: Request, problem: Problem) -> JSONResponse:
    dialect = Dialect.OPENAI if request.url.path.startswith(_OPENAI_PATHS) else Dialect.PLAIN
    status = problem.http_status
    headers = {"X-Turnstile-Error": str(problem.code)}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(max(1, ceil(problem.retry_after)))
    return JSONResponse(body(problem, dialect), status, headers)
