"""What training a block and training the whole model share: the sequences of a step, the rates, the
step itself as a CUDA graph.

All choices follow from the seed: the same request gives the same bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

HELD_OUT = 24  # one sequence of so many is never trained on and decides whether training is kept
WARMUP = 10  # steps
BETAS = (0.9, 0.99)

Row = tuple[Tensor, Tensor]  # input and target, (1, length, ...) each; or (batch, length, ...)


class Trainable(Protocol):
    """A quantized weight whose parameters can be trained. All schemes made by `finetune` have one
    (Solved.trainable)."""

    scale_rate: float  # of scales, relative to those of a uniform grid

    @property
    def rounding(self) -> Callable[[Tensor], Tensor] | None:
        """As Solved's."""

    @property
    def codes(self) -> list[Tensor]:
        """Leaf tensors, in steps of their grid."""

    @property
    def scales(self) -> list[Tensor]:
        """Leaf tensors, as changes relative to where training started."""

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(n, k): the weight as it would be stored and decoded now, with gradients."""

    def settle(self) -> Any:
        """The Solved that it is now."""

    def changed(self) -> dict[str, Tensor]:
        """Of the canonical tensors, those that training may have changed."""


def split_held_out(count: int) -> tuple[list[int], list[int]]:
    """Indices of sequences to train on, and of those held out."""
    held_out = list(range(HELD_OUT // 2, count, HELD_OUT)) or [count - 1]
    return [i for i in range(count) if i not in held_out], held_out


def draws(lengths: Sequence[int], tokens: int, seed: int) -> Iterator[list[int]]:
    """For each step, indices of different sequences with about `tokens` tokens together."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn, total = [], 0
        for index in torch.randperm(len(lengths), generator=generator).tolist():
            drawn.append(index)
            total += lengths[index]
            if total + lengths[index] // 2 >= tokens:
                break
        yield drawn


def rate(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to zero."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Adam:
    """torch's Adam with the rates in tensors, so that a captured step sees them change."""

    def __init__(self, groups: Sequence[tuple[Sequence[Tensor], float]]) -> None:
        given = [(list(tensors), rate) for tensors, rate in groups if tensors]
        self.device = given[0][0][0].device
        for tensors, _ in given:
            for tensor in tensors:
                tensor.requires_grad_()
        self.rates = [rate for _, rate in given]
        self.optimizer = torch.optim.Adam(
            [
                {"params": tensors, "lr": torch.tensor(rate, device=self.device)}
                for tensors, rate in given
            ],
            betas=BETAS,
            eps=1e-12,
            fused=True,
            capturable=self.device.type == "cuda",
        )

    def set_rate(self, share: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(rate * share)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        """Free gradients and moments; the parameters are plain tensors again."""
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                tensor.requires_grad_(False)
                tensor.grad = None
        self.optimizer.state.clear()


def mixed_precision(device: torch.device) -> Any:
    """On a GPU products run in bf16, sums, norms and the residual stream in fp32; a CPU computes in
    the activations' own dtype."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of decoded weights under mixed_precision, for activations of `dtype`."""
    return torch.bfloat16 if device.type == "cuda" else dtype


class FixedOrder(TorchFunctionMode):
    """Makes flash attention sum its gradients in a fixed order: it does so where deterministic
    algorithms are demanded, not where torch only warns. They are demanded during its backward pass
    alone: cuBLAS' products would need the environment variable CUBLAS_WORKSPACE_CONFIG."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention and "FlashAttention" in str(made.grad_fn):
            made.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
            made.grad_fn.register_hook(
                lambda *_: torch.use_deterministic_algorithms(True, warn_only=True)
            )
        return made


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """A GPU sums the gradients of attention in a fixed order; a CPU always does. cuDNN's attention
    has no such order."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # for debugging only, and slow
    try:
        with FixedOrder(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def joined(rows: list[Row], most: int) -> list[Row]:
    """Rows (pairs of tensors of one sequence) as batches of at most `most` sequences, if all have
    one length; else as they are."""
    if len({first.shape[1] for first, _ in rows}) > 1:
        return rows
    parts = [rows[i : i + most] for i in range(0, len(rows), most)]
    return [
        (torch.cat([first for first, _ in part]), torch.cat([second for _, second in part]))
        for part in parts
    ]


class Captured:
    """A function of tensors of fixed shapes as a CUDA graph: the kernels of a step on a
    small block are shorter than starting them one by one. Its first calls, which are real steps,
    run it as it is."""

    WARM = 3

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given: list[Tensor] = []
        self.result = torch.empty(0)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, *given: Tensor) -> Tensor:
        self.calls += 1
        if self.graph is not None:
            for mine, value in zip(self.given, given, strict=True):
                mine.copy_(value)
            self.graph.replay()
            return self.result
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.function(*given)
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.calls == self.WARM:
            self.given = [value.clone() for value in given]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function(*self.given)
        return result
