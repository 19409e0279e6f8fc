"""Engine: one model, one paged KV cache, one step at a time. A single thread calls it.

    requests -> sequences -> scheduler.step() -> pieces -> decoder, one flat batch -> logits
             <- texts      <- detokenizer, stops        <- chosen tokens           <-

A step mixes prefill chunks and decodes under a token budget. An error in the numbers of one request
ends it alone; an error of a whole step ends the requests in it, never the engine. Where the device
is asynchronous (a GPU), text is detokenized while it computes, and steps run ahead: the next one is
launched before the tokens of this one have arrived, and what it computes for a sequence that turns
out to have ended is dropped.
"""

import itertools
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from billfish.engine.kv.pages import Pages
from billfish.engine.params import SamplingParams
from billfish.engine.runner import Decoded, Runner, last_rows
from billfish.engine.sampling import Chooser, Chosen, choose_tokens, logprobs_of
from billfish.engine.scheduler import Piece, Scheduler, Sequence
from billfish.engine.text import Detokenizer, StopFinder, Vocabulary
from billfish.errors import UserError

SCORED = 256  # prompt tokens whose logits are in memory at once
Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass
class Completion:
    """One of a request's n completions; grows until it has a finish_reason."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Chosen] = field(default_factory=list)  # if asked for
    finish_reason: Reason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None
    user_error: bool = False  # the request itself caused the error

    def fail(self, error: Exception) -> None:
        self.user_error = isinstance(error, UserError)
        self.error = str(error) if self.user_error else f"{type(error).__name__}: {error}"
        self.finish_reason = "error"


@dataclass
class RequestOutput:
    name: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    # Of every prompt token but the first, given those before it; if asked for.
    prompt_logprobs: list[Chosen] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(eq=False)
class _Run:
    """A running sequence with its sampler, detokenizer and stop strings."""

    request: RequestOutput
    completion: Completion
    params: SamplingParams
    sequence: Sequence
    chooser: Chooser
    words: Detokenizer
    stops: StopFinder


@dataclass(frozen=True)
class _Flying:
    """A step in flight: its tokens have not been read."""

    decoded: Decoded
    # run, its row in `decoded`, and where in its output the token goes
    rows: list[tuple[_Run, int, int]]


class Engine:
    """`add`, then `step` until idle. Outputs are filled in place."""

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
        self._vocabulary = Vocabulary(tokenizer)
        self.pages, self.most_tokens = pages, most_tokens
        self.scheduler = Scheduler(pages, budget, most_sequences)
        self.runs: dict[str, _Run] = {}
        self._late: list[tuple[_Run, Chosen]] = []  # tokens still to be detokenized
        self._flying: _Flying | None = None
        self._unscored: list[_Run] = []  # runs whose prompt could not be scored in this step
        self._salts = itertools.count(1)

    @property
    def idle(self) -> bool:
        return not self.runs

    def add(self, request: RequestOutput, params: SamplingParams) -> None:
        """ValueError if it needs more pages than there are."""
        prompt, scored = request.prompt_token_ids, params.prompt_logprobs is not None
        if scored:
            request.prompt_logprobs = []
        for completion in request.outputs:
            sequence = Sequence(
                name=f"{request.name}/{completion.index}",
                prompt=list(prompt),
                most=min(len(prompt) + params.max_tokens, self.most_tokens),
                salt=next(self._salts)
                if scored
                else 0,  # scores need every token computed: no prefix cache
            )
            vocabulary = self.decoder.shape.vocabulary
            self.scheduler.add(sequence)
            self.runs[sequence.name] = _Run(
                request,
                completion,
                params,
                sequence,
                Chooser(params, prompt, vocabulary, self.eos, completion.index),
                Detokenizer(self._vocabulary, prompt, params.skip_special_tokens),
                StopFinder(params.stop, params.include_stop_str_in_output),
            )

    def cancel(self, name: str) -> None:
        """Ends a request and frees its pages at once; ignores unknown names."""
        for run in [run for run in self.runs.values() if run.request.name == name]:
            self._end(run, "cancelled")

    def step(self) -> list[RequestOutput]:
        """Runs what the scheduler picks; returns the requests that have something new."""
        news: list[_Run] = []
        self._unscored = []
        before, self._flying = self._flying, None
        if before is not None and not self._promise(before):
            news += self._land(before)
            before = None
        pieces = self.scheduler.step()
        try:
            decoded = self._run(pieces) if pieces else None
            if before is not None:
                news += self._land(before)
            news += self._write_late()  # while the device works
            self.scheduler.ran(pieces)
            going = self._going(pieces)
            news += self._end_scored(pieces) + self._unscored
            if decoded is not None and decoded.found is not None:
                rows = [(run, row, len(run.sequence.output)) for run, row in going]
                self._flying = _Flying(decoded, rows)
                return _once(run.request for run in news)
            if decoded is None and self.runs and before is None:
                raise RuntimeError("the scheduler finds nothing that it could run")
            chosen = self._choose(decoded, going) if decoded is not None else []
        except Exception as error:  # out of memory, or a bug: the other requests go on
            names = [piece.sequence.name for piece in pieces] or list(self.runs)
            failed = [self.runs[name] for name in names if name in self.runs]
            for run in failed:
                self._fail(run, error)
            return _once(run.request for run in (*news, *self._unscored, *failed))
        for (run, _), one in zip(going, chosen, strict=True):
            self._take(run, one)
        if not self.runner.asynchronous:
            news += self._write_late()
        ended = (run for run, _ in going if run.completion.finish_reason is not None)
        return _once(run.request for run in (*news, *ended))

    def _run(self, pieces: Many[Piece]) -> Decoded:
        """Logits of the pieces that sample; scores prompts on the way."""
        runs = [self.runs[piece.sequence.name] for piece in pieces]
        if all(run.params.prompt_logprobs is None for run in runs):
            asking = [run for run, piece in zip(runs, pieces, strict=True) if piece.samples]
            if self.runner.asynchronous and all(map(_is_plain, asking)):
                return self.runner.run(pieces, [run.chooser.rule() for run in asking])
            return self.runner.run(pieces)
        hidden = self.runner.hidden(pieces)
        self._score(hidden, pieces)
        return Decoded(self.decoder.logits(hidden[last_rows(pieces)]))

    def _going(self, pieces: Many[Piece]) -> list[tuple[_Run, int]]:
        """Runs that sample a token, and their rows; without those that have ended meanwhile."""
        asking = [piece.sequence.name for piece in pieces if piece.samples]
        return [(self.runs[name], row) for row, name in enumerate(asking) if name in self.runs]

    def _choose(self, decoded: Decoded, going: Many[tuple[_Run, int]]) -> list[Chosen | Exception]:
        rows, logits = [row for _, row in going], decoded.logits
        return choose_tokens(
            logits if len(rows) == len(logits) else logits[rows], [run.chooser for run, _ in going]
        )

    def _end_scored(self, pieces: Many[Piece]) -> list[_Run]:
        """Ends requests that only score their prompt (max_tokens 0)."""
        ended = []
        for piece in pieces:
            run = self.runs.get(piece.sequence.name)
            if run is None or run.params.max_tokens > 0:
                continue
            if piece.start + piece.count == len(piece.sequence):
                self._end(run, "length")
                ended.append(run)
        return ended

    def _promise(self, flying: _Flying) -> bool:
        """Runs ahead: gives sequences in flight a placeholder for their next token, -1 - row, which
        the device replaces. False where tokens must be known first: a sequence that is preempted
        looks its tokens up in the prefix cache."""
        if not self.scheduler.can_grow():
            return False
        for run, row, _ in flying.rows:
            if (
                run.completion.finish_reason is None
                and len(run.sequence.output) + 1 < run.params.max_tokens
                and len(run.sequence) + 1 < run.sequence.most
            ):
                run.sequence.output.append(-1 - row)
        return True

    def _land(self, flying: _Flying) -> list[_Run]:
        """Reads and takes the tokens of a step; returns the runs that have ended."""
        try:
            tokens, peaks = flying.decoded.drawn()
        except Exception as error:
            for run, _, _ in flying.rows:
                if run.completion.finish_reason is None:
                    self._fail(run, error)
            return [run for run, _, _ in flying.rows]
        for run, row, at in flying.rows:
            if run.completion.finish_reason is not None:
                continue
            del run.sequence.output[at:]  # the placeholder
            if math.isfinite(peaks[row]):
                run.chooser.note(tokens[row])
                self._take(run, Chosen(tokens[row]))
            else:
                self._take(
                    run,
                    ArithmeticError(
                        f"token {at + 1} of this sequence: a logit is NaN or infinite. The model "
                        "overflowed; load it with a wider dtype."
                    ),
                )
        return [run for run, _, _ in flying.rows if run.completion.finish_reason is not None]

    @torch.inference_mode()
    def _score(self, hidden: Tensor, pieces: Many[Piece]) -> None:
        """Log probabilities of the prompt tokens that follow those of each piece."""
        starts = itertools.accumulate((piece.count for piece in pieces[:-1]), initial=0)
        for start, piece in zip(starts, pieces, strict=True):
            run = self.runs[piece.sequence.name]
            scores, count = run.request.prompt_logprobs, run.params.prompt_logprobs
            if scores is None or count is None or run.completion.index > 0:
                continue
            done = len(scores)  # a preempted prompt is computed again, but scored once
            first, end = max(piece.start, done), piece.start + piece.count
            following = piece.sequence.prompt[first + 1 : end + 1]
            try:
                for row in range(0, len(following), SCORED):  # all at once would be gigabytes
                    some = following[row : row + SCORED]
                    at = start + first - piece.start + row
                    logits = self.decoder.logits(hidden[at : at + len(some)])
                    tokens = torch.tensor(some, device=hidden.device)
                    scores += logprobs_of(logits, tokens, [count] * len(some))
            except Exception as error:  # the others go on
                self._fail(run, error)
                self._unscored.append(run)

    def _take(self, run: _Run, chosen: Chosen | Exception) -> None:
        """Appends a token, and ends the run if it was the last or an error."""
        try:
            if isinstance(chosen, Exception):
                raise chosen
            self._accept(run, chosen)
        except Exception as error:
            self._fail(run, error)

    def _accept(self, run: _Run, chosen: Chosen) -> None:
        sequence, completion, params = run.sequence, run.completion, run.params
        sequence.output.append(chosen.token)
        run.request.cached_tokens = max(run.request.cached_tokens, sequence.cached)
        stops = chosen.token in params.stop_token_ids
        if stops or (chosen.token in self.eos and not params.ignore_eos):
            completion.stop_reason = chosen.token if stops else None
            if stops and params.include_stop_str_in_output:
                self._write(run, chosen)
            else:
                self._note(run, chosen)
            self._end(run, "stop")
            return
        matcher = run.chooser.matcher
        done = matcher is not None and matcher.ended
        if done or len(sequence.output) >= params.max_tokens or len(sequence) >= sequence.most:
            self._end(run, "stop" if self._write(run, chosen) or done else "length")
        else:
            self._late.append((run, chosen))

    def _write_late(self) -> list[_Run]:
        """Detokenizes the tokens taken before; returns their runs."""
        late, self._late = self._late, []
        written = [(run, chosen) for run, chosen in late if run.completion.finish_reason is None]
        for run, chosen in written:
            try:
                if self._write(run, chosen):
                    self._end(run, "stop")
            except Exception as error:  # the tokenizer's; the other requests go on
                self._fail(run, error)
        return [run for run, _ in written]

    def _note(self, run: _Run, chosen: Chosen) -> None:
        run.completion.token_ids.append(chosen.token)
        if run.params.logprobs is not None:
            run.completion.logprobs.append(chosen)

    def _write(self, run: _Run, chosen: Chosen) -> bool:
        """Appends its text; True if a stop string was found."""
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
        run.completion.fail(error)
        if self.runs.pop(run.sequence.name, None) is not None:
            self.scheduler.cancel(run.sequence.name)


def _is_plain(run: _Run) -> bool:
    """Whether the device can sample it: logits are not edited, and no logprobs are asked for."""
    return not run.chooser.edits and run.params.logprobs is None


def _once(requests: Any) -> list[RequestOutput]:
    return list({id(request): request for request in requests}.values())
