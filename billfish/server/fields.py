"""Fields of a request that are not implemented, have no effect, or are unknown.

A field that would change the response and is not implemented is refused. One without effect (a
user's name) is ignored; so is an unknown one, which is logged once.
"""

import logging
from collections.abc import Mapping
from typing import Any

from billfish.server.errors import ApiError, quoted
from billfish.server.protocol import (
    SAMPLING,
    ChatRequest,
    CompletionRequest,
    Detokenize,
    TokenizeText,
)

log = logging.getLogger("billfish.server")
# Not implemented, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structural_tag": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "priority": (0,),
    "continue_final_message": (False,),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
}
WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "verbosity",
    "cache_salt",
}
KNOWN = {"model", *SAMPLING}.union(
    *(kind.model_fields for kind in (ChatRequest, CompletionRequest, TokenizeText, Detokenize))
) - {"sampling"}
_logged: set[str] = set()


def check_fields(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in KNOWN or name in WITHOUT_EFFECT or value is None:
            continue
        if name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                told = f"{name} {quoted(value)}: not supported by this server. Leave it out."
                raise ApiError(400, told, name, "unsupported_parameter")
        elif name not in _logged and len(_logged) < 100:
            _logged.add(name)
            log.warning("a request has %s, which is unknown and has no effect", quoted(name))
