"""The sentinel: runs what was written against the original, to see whether it still is a model.

Both run over a few prompts, block by block: the weights of one block (of its experts one) are in
memory at a time, read from the source and decoded from the shard. Each block also runs alone, on
the inputs that it has in the original, which tells where a fault begins, however little is left of
the states behind it; and so does each expert, as few tokens may reach it.

Nothing is generated: at every position both models see the same text, and their next tokens are
compared (teacher forcing). One pass gives what 64 passes would, but for what follows a difference.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from billfish.checkpoints.packed import by_module
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tokenizer import load_tokenizer, refuse_foreign
from billfish.errors import UserError
from billfish.models.blocks import Arguments, Read, StreamedModel
from billfish.models.experts import Experts, routed
from billfish.models.load import rows_of
from billfish.models.passes import Call, rounded_input
from billfish.offline.streaming import return_freed_memory
from billfish.offline.task import Task
from billfish.offline.text import SAMPLE, read_documents
from billfish.offline.verdict import (
    NO_ANSWERS,
    Answers,
    Block,
    Expert,
    expert_figures,
    faults,
    verdict,
)
from billfish.schemes.registry import quantizer

PROMPTS, LENGTH = 4, 64  # texts and their tokens; the second half of each is compared
UNREACHED = 16  # about as many tokens for an expert that none is routed to
CHARACTERS = 16 * LENGTH  # of a text, enough for LENGTH tokens


@dataclass(frozen=True)
class Prompts:
    ids: Tensor  # (PROMPTS, length) int64
    text: str  # what they are


def prompts(task: Task) -> Prompts:
    """Pieces of the shipped text; random tokens for a model without a tokenizer of its own."""
    rows = rows_of(task.model.model)
    config = task.model.model.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    try:
        tokenizer = load_tokenizer(task.source.path)
        refuse_foreign(tokenizer, rows, task.source.path)
    except UserError:
        drawn = torch.Generator().manual_seed(task.request.seed)
        return Prompts(torch.randint(rows, (PROMPTS, length), generator=drawn), "random tokens")
    whole = read_documents(SAMPLE)[0]
    step = len(whole) // PROMPTS
    pieces = [whole[i * step : i * step + CHARACTERS] for i in range(PROMPTS)]
    ids = [tokenizer(piece, verbose=False)["input_ids"] for piece in pieces]
    length = min(length, *map(len, ids))
    return Prompts(torch.tensor([each[:length] for each in ids]), SAMPLE)


class Written:
    """The quantized model, read from its shards: weights decoded, inputs rounded if need be."""

    def __init__(self, task: Task, shards: list[Path]) -> None:
        self.scheme, self.model, self.head = task.scheme, task.model, task.head
        self.files = Checkpoint.of_files(list(map(str, shards)))
        self.parts = by_module(self.files)

    def read(self, stored: str, device: torch.device) -> Tensor:
        if stored in self.files:
            return self.files.tensor(stored).to(device)
        if self.head is not None and stored == self.head.weight:  # not tied: see packed_head
            return torch.zeros(self.head.n, self.head.k, device=device)
        return self.scheme.dequantize(self._packed(stored, device))

    @contextmanager
    def packed_head(self) -> Iterator[None]:
        """Within this context the model's head is the packed one, if there is one: tied to the
        embedding in the original, it is a layer of its own here."""
        if self.head is None:
            yield
            return
        module = self.model.model.get_submodule(self.head.module)
        before = module.weight
        tensors = self._packed(f"{self.head.module}.weight", self.model.device)
        weight = self.head.scheme.dequantize(tensors).to(self.model.dtype)
        module.weight = nn.Parameter(weight, requires_grad=False)
        try:
            yield
        finally:
            module.weight = before

    def _packed(self, stored: str, device: torch.device) -> dict[str, Tensor]:
        names = self.parts[stored.removesuffix(".weight")]
        packed = {part: name for part, name in names.items() if part != "bias"}
        return {part: self.files.tensor(name).to(device) for part, name in packed.items()}

    @contextmanager
    def rounding(self, index: int) -> Iterator[None]:
        """Within this context the block's linears round their inputs as its scheme says."""
        rounds = getattr(quantizer(self.scheme), "input_rounding", None)
        with ExitStack() as stack:
            for linear in self.model.linears(index):
                if rounds is not None and linear.weight not in self.files:
                    tensors = self._packed(linear.weight, self.model.device)
                    rounding = rounds(self.scheme, tensors)
                    block = self.model.blocks[index]
                    stack.enter_context(rounded_input(block, [linear.path], rounding))
            yield


def check(task: Task, shards: list[Path], tell: Callable[[int], None]) -> dict[str, Any]:
    """Compare the written model with the original; `tell` is called after each block.

    For the report: figures with four digits, None for those that are not finite or not known;
    `problem` says in sentences what is wrong, or is None.
    """
    model, written, given = task.model, Written(task, shards), prompts(task)
    blocks, experts = [], []
    with torch.no_grad():
        wanted, arguments = _first(model, given.ids, None)
        found, _ = _first(model, given.ids, written.read)
        for index in range(len(model.blocks)):
            prefix, inputs = model.block_prefix(index), wanted
            model.fill(prefix)
            with _routing(model.blocks[index]) as calls:
                wanted = model.run(index, inputs, arguments)
            originals = dict(_each_expert(model.blocks[index], calls))
            model.drop(prefix)
            model.fill(prefix, read=written.read)
            with written.rounding(index):  # one run: experts are decoded whenever they run
                both = model.run(index, torch.cat((inputs, found)), arguments)
                for name, made in _each_expert(model.blocks[index], calls):
                    right = originals.pop(name)
                    error = _median_error(made, right, right)
                    experts.append(Expert(prefix + name, error, len(right)))
            alone, found = both.chunk(2)
            model.drop(prefix)
            own = _median_error(alone, wanted, wanted - inputs)
            blocks.append(Block(index, own, _median_error(found, wanted, wanted)))
            return_freed_memory()
            tell(index + 1)
        answers = _answers(task, written, given.ids, wanted, found)
    return {
        "text": given.text,
        "tokens": given.ids.numel(),
        **(answers.figures() if answers else NO_ANSWERS),
        "blocks": [block.figures() for block in blocks],
        "faults": [block.index for block in faults(blocks)],
        "experts": expert_figures(experts),
        "problem": verdict(blocks, answers, model.prefix, experts),
    }


def _first(model: StreamedModel, ids: Tensor, read: Read | None) -> tuple[Tensor, Arguments]:
    states, arguments = model.first_inputs([ids, torch.cat((ids, ids))], read)
    return states[0], arguments


@contextmanager
def _routing(block: nn.Module) -> Iterator[dict[str, Call]]:
    """Within this context: what routers give each Experts of the block, by its path."""
    calls: dict[str, Call] = {}
    with ExitStack() as stack:
        for path, module in block.named_modules():
            if isinstance(module, Experts):

                def see(module: nn.Module, given: Call, path: str = path) -> None:
                    calls[path] = given

                stack.callback(module.register_forward_pre_hook(see).remove)
        yield calls


def _each_expert(block: nn.Module, calls: dict[str, Call]) -> Iterator[tuple[str, Tensor]]:
    """Name and output of each expert alone, on the tokens that are routed to it, or on some if none
    are: an expert that the texts do not reach may be broken, too."""
    for path, (hidden, index, _) in calls.items():
        experts = block.get_submodule(path)
        assert isinstance(experts, Experts)
        own = {expert: hidden[rows] for expert, rows, _ in routed(index, experts.count)}
        some = hidden[:: max(1, len(hidden) // UNREACHED)]
        for expert in range(experts.count):
            yield f"{path}.{expert}", experts.run(expert, own.get(expert, some))


def _median_error(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """Squared error of a token relative to the square of `scale`; the median over tokens, since the
    few with huge states, the first ones, would decide a sum alone."""
    lost, whole = (x.double().square().sum(-1) for x in (found - wanted, scale))
    return float((lost / whole.clamp_min(torch.finfo(torch.float32).tiny)).median())


def _answers(
    task: Task, written: Written, ids: Tensor, wanted: Tensor, found: Tensor
) -> Answers | None:
    """What both models answer; None if the checkpoint has no head. One text at a time: logits may
    be larger than all states."""
    model, outside = task.model, task.model.prefix + "."
    if model.is_encoder or model.unfilled:
        return None
    both: list[Tensor] = []
    width: int | None = None
    for read, states in ((None, wanted), (written.read, found)):
        model.fill("", skip=outside, read=read)
        width = model.output_width(ids[:1]) if width is None else width
        with nullcontext() if read is None else written.packed_head():
            each = [
                model.logits(ids[i : i + 1], states[i : i + 1], width)[0, ids.shape[1] // 2 :]
                for i in range(len(ids))
            ]
        both.append(torch.cat(each).float().log_softmax(-1))
        model.drop("", skip=outside)
    return Answers.of(*both)
