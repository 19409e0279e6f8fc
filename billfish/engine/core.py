"""Engine: one model, one paged cache, steps. Synchronous; a single thread calls it.

    requests -> sequences -> scheduler.step() -> pieces -> decoder, one flat batch -> logits
             <- texts      <- detokenizer, stops        <- chosen tokens           <-

A step mixes prompts and decodes under a budget of tokens. Whatever goes wrong in a step ends the
requests that were in it, never the engine. Where the device works by itself, tokens of one step
become text while the next is under way; a stop string then ends a text one token late, which is
dropped.
"""

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from billfish.engine.pages import Pages
from billfish.engine.runner import Runner
from billfish.engine.sampling import Chooser, Chosen, SamplingParams, choose
from billfish.engine.scheduler import Piece, Scheduler, Sequence
from billfish.engine.text import Detokenizer, StopFinder

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass
class Completion:
    """One of a request's n texts; grows until it has a finish_reason."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Chosen] = field(default_factory=list)  # if asked for
    finish_reason: Reason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None


@dataclass
class RequestOutput:
    name: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0  # of the prompt, found in pages of earlier ones
    # Of every prompt token but the first, given those before it; if asked for.
    prompt_logprobs: list[float] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(eq=False)
class _Run:
    """One sequence and what turns its tokens into text."""

    request: RequestOutput
    completion: Completion
    params: SamplingParams
    sequence: Sequence
    chooser: Chooser
    words: Detokenizer
    stops: StopFinder


class Engine:
    """`add`, then `step` until nothing is unfinished. Outputs are filled in place."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        pages: Pages,
        eos: frozenset[int],
        budget: int,
        most_sequences: int,
        most_tokens: int,
    ) -> None:
        self.runner, self.decoder = runner, runner.decoder
        self.tokenizer, self.eos = tokenizer, eos
        self.pages, self.most_tokens = pages, most_tokens
        self.scheduler = Scheduler(pages, budget, most_sequences)
        self.runs: dict[str, _Run] = {}
        self._late: list[tuple[_Run, Chosen]] = []  # tokens whose text is to be written
        self._salts = itertools.count(1)

    @property
    def idle(self) -> bool:
        return not self.runs

    def add(self, request: RequestOutput, params: SamplingParams) -> None:
        """ValueError if its pages are more than there are."""
        prompt = request.prompt_token_ids
        scored = request.prompt_logprobs is not None
        for completion in request.outputs:
            sequence = Sequence(
                name=f"{request.name}/{completion.index}",
                prompt=list(prompt),
                most=min(len(prompt) + params.max_tokens, self.most_tokens),
                salt=next(self._salts) if scored else 0,  # all is computed: nothing is shared
            )
            vocabulary = self.decoder.shape.vocabulary
            self.scheduler.add(sequence)
            self.runs[sequence.name] = _Run(
                request, completion, params, sequence,
                Chooser(params, prompt, vocabulary, self.eos, completion.index),
                Detokenizer(self.tokenizer, prompt), StopFinder(params.stop),
            )  # fmt: skip

    def cancel(self, name: str) -> None:
        """Of a request. Its pages are free at once; unknown names are nothing to do."""
        for run in [run for run in self.runs.values() if run.request.name == name]:
            self._end(run, "cancelled")

    def step(self) -> list[RequestOutput]:
        """Runs what the scheduler picks; gives the requests that have something new."""
        pieces = self.scheduler.step()
        if not pieces:
            runs = list(self.runs.values())
            for run in runs:
                self._fail(run, RuntimeError("the scheduler finds nothing that it could run"))
            return _once(run.request for run in runs)
        asking = [piece for piece in pieces if piece.samples]
        news: list[_Run] = []
        try:
            logits = self._logits(pieces)
            news += self._write_late()  # while the device works
            self.scheduler.ran(pieces)
            # What has ended meanwhile draws nothing.
            rows = [row for row, one in enumerate(asking) if one.sequence.name in self.runs]
            going = [self.runs[asking[row].sequence.name] for row in rows]
            logits = logits if len(rows) == len(asking) else logits[rows]
            chosen = choose(logits, [run.chooser for run in going])
        except Exception as error:  # memory, or a mistake of ours: the others go on
            names = [piece.sequence.name for piece in pieces]
            failed = [self.runs[name] for name in names if name in self.runs]
            for run in failed:
                self._fail(run, error)
            return _once(run.request for run in (*news, *failed))
        for run, one in zip(going, chosen, strict=True):
            try:
                if isinstance(one, Exception):
                    raise one
                self._take(run, one)
            except Exception as error:
                self._fail(run, error)
        if not self.runner.asynchronous:
            news += self._write_late()
        ended = (run for run in going if run.completion.finish_reason is not None)
        return _once(run.request for run in (*news, *ended))

    def _logits(self, pieces: Many[Piece]) -> Tensor:
        """Of the pieces that sample; scores of prompts on the way."""
        runs = [self.runs[piece.sequence.name] for piece in pieces]
        if all(
            piece.count == 1 and piece.samples and run.request.prompt_logprobs is None
            for piece, run in zip(pieces, runs, strict=True)
        ):
            return self.runner.decode(pieces)
        hidden = self.runner.hidden(pieces)
        starts = list(itertools.accumulate((piece.count for piece in pieces[:-1]), initial=0))
        self._score(hidden, starts, pieces)
        last = [start + piece.count - 1 for start, piece in zip(starts, pieces, strict=True)
                if piece.samples]  # fmt: skip
        return self.decoder.logits(hidden[last])

    @torch.inference_mode()
    def _score(self, hidden: Tensor, starts: list[int], pieces: Many[Piece]) -> None:
        """What the model gave the prompt's tokens that follow those of each piece."""
        for start, piece in zip(starts, pieces, strict=True):
            scores = self.runs[piece.sequence.name].request.prompt_logprobs
            if scores is None:
                continue
            done = len(scores)  # a preempted prompt is computed twice, and scored once
            first, end = max(piece.start, done), piece.start + piece.count
            following = piece.sequence.prompt[first + 1 : end + 1]
            if following:
                rows = hidden[start + first - piece.start :][: len(following)]
                logprobs = self.decoder.logits(rows).log_softmax(-1)
                wanted = torch.tensor(following, device=hidden.device)[:, None]
                scores += logprobs.gather(1, wanted)[:, 0].tolist()

    def _take(self, run: _Run, chosen: Chosen) -> None:
        """A token more, and whether it was the last."""
        sequence, completion, params = run.sequence, run.completion, run.params
        sequence.output.append(chosen.token)
        run.request.cached_tokens = max(run.request.cached_tokens, sequence.cached)
        stops = chosen.token in params.stop_token_ids
        if stops or (chosen.token in self.eos and not params.ignore_eos):
            completion.stop_reason = chosen.token if stops else None
            self._note(run, chosen)
            self._end(run, "stop")
        elif len(sequence.output) >= params.max_tokens or len(sequence) >= sequence.most:
            self._end(run, "stop" if self._write(run, chosen) else "length")
        else:
            self._late.append((run, chosen))

    def _write_late(self) -> list[_Run]:
        """Text of the tokens taken before; the runs that have some."""
        late, self._late = self._late, []
        written = [(run, chosen) for run, chosen in late if run.completion.finish_reason is None]
        for run, chosen in written:
            try:
                if self._write(run, chosen):
                    self._end(run, "stop")
            except Exception as error:  # a tokenizer's; the others go on
                self._fail(run, error)
        return [run for run, _ in written]

    def _note(self, run: _Run, chosen: Chosen) -> None:
        run.completion.token_ids.append(chosen.token)
        if run.params.logprobs is not None:
            run.completion.logprobs.append(chosen)

    def _write(self, run: _Run, chosen: Chosen) -> bool:
        """Its text; whether a stop string is in it."""
        self._note(run, chosen)
        return self._show(run, run.words.add(chosen.token))

    def _show(self, run: _Run, text: str) -> bool:
        shown, found = run.stops.add(text)
        run.completion.text += shown
        if found:
            run.completion.stop_reason = run.stops.found
        return found

    def _end(self, run: _Run, reason: Reason) -> None:
        if not isinstance(run.completion.stop_reason, str):  # else the text ends before the stop
            found = self._show(run, run.words.finish())
            run.completion.text += "" if found else run.stops.finish()
        run.completion.finish_reason = reason
        if reason == "cancelled":
            self.scheduler.cancel(run.sequence.name)
        else:
            self.scheduler.finish(run.sequence)
        del self.runs[run.sequence.name]

    def _fail(self, run: _Run, error: Exception) -> None:
        run.completion.error = f"{type(error).__name__}: {error}"
        run.completion.finish_reason = "error"
        if self.runs.pop(run.sequence.name, None) is not None:
            self.scheduler.cancel(run.sequence.name)


def _once(requests: Any) -> list[RequestOutput]:
    return list({id(request): request for request in requests}.values())
