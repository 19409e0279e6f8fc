"""A request -> SamplingParams and the structured output that the text must match."""

from typing import Any

from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.engine.structured import Matcher, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server.errors import ApiError, invalid
from billfish.server.protocol import Generating

STRUCTURED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def structured_outputs(request: Generating) -> StructuredOutputsParams | None:
    """What OpenAI's response_format, or one of vLLM's fields, asks the text to match."""
    asked: dict[str, Any] = {}
    for name in STRUCTURED:
        value = getattr(request, name)
        if name == "response_format":
            value = _response_format(value)
        elif name.startswith("guided_") and value is not None:
            value = {name.removeprefix("guided_"): value}
        if value is not None:
            asked[name] = value
    if len(asked) > 1:
        raise invalid(", ".join(asked), None, "one of them")
    for name, value in asked.items():
        try:
            made = SamplingParams(structured_outputs=value).structured_outputs
        except UserError as error:
            raise ApiError(400, str(error), name) from None
        assert isinstance(made, StructuredOutputsParams)
        return made
    return None


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None or given == {"type": "text"}:
        return None
    form = given if isinstance(given, dict) else {"type": given}
    schema = form["json_schema"] if isinstance(form.get("json_schema"), dict) else {}
    if form.get("type") == "json_object":
        return {"json_object": True}
    if form.get("type") == "json_schema" and "schema" in schema:
        return {"json": schema["schema"]}
    rule = "of type text, json_object, or json_schema with json_schema: {name, schema}"
    raise invalid("response_format", form, rule)


def sampling_params(
    request: Generating,
    max_tokens: int,
    top: int | None,
    llm: LLM,
    matcher: Matcher | None,
    **more: Any,
) -> SamplingParams:
    """`top`: alternatives to report for each token, of an echoed prompt as well."""
    scored = (top if max_tokens else top or 0) if request.echo else None
    try:
        made = SamplingParams(
            n=request.n,
            max_tokens=max_tokens,
            logprobs=top,
            prompt_logprobs=scored,
            structured_outputs=matcher,
            logit_bias=request.logit_bias or {},
            **(request.sampling | more),
        )
        llm.check(made)
    except UserError as error:
        raise ApiError(400, str(error), error.part) from None
    return made
