"""Refused requests: an HTTP status, and the error in OpenAI's shape.

Clients read `type` and `code`, people read `message`: what was given, the rule, the way out.
"""

import json
import reprlib
from typing import Any

from fastapi import Response

LONGEST = 600  # characters of a message, which may quote what a client sent
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
quoted = reprlib.repr  # of what a client sent, shortened


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = self.message
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        return {
            "error": {
                "message": message,
                "type": TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        # ASCII: a lone surrogate, which JSON admits, cannot be encoded in UTF-8.
        text = json.dumps(self.body())
        return Response(text, self.status, self.headers, media_type="application/json")


def invalid(name: str, value: Any, rule: str) -> ApiError:
    return ApiError(400, f"{name} {quoted(value)}: {rule}.", name)


def internal_error() -> ApiError:
    return ApiError(500, "an error inside the server; its log has more.", code="internal_error")


def queue_full(told: str) -> ApiError:
    return ApiError(503, told, code="queue_full", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    told, again = "the server is stopping; ask another one.", {"Retry-After": "5"}
    return ApiError(503, told, code="shutting_down", headers=again)
