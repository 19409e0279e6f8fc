"""Billfish as a quantization method of vLLM: the entry point `vllm.general_plugins` registers it.

Checkpoints of our own dialect name it in their config; with quantization="billfish" it also runs
the other formats that Billfish reads (compressed-tensors, GPTQ, AWQ), which vLLM else keeps for
itself. Tensors are taken whole from vLLM's loader and cut by Scheme.shard (parallel.py). Imports of
vLLM are at the top: where they fail, vLLM logs it and runs without this method.
"""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from billfish.checkpoints.dialects import read_dialect
from billfish.checkpoints.own import METHOD
from billfish.checkpoints.packed import by_module, small_tensors
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.integrations.parallel import Layer, Slices, Stored
from billfish.models.load import check
from billfish.schemes.base import Scheme
from billfish.schemes.registry import compile_kernels

QKV = {"q": 0, "k": 1, "v": 2}  # vLLM's names of the parts of a merged layer; else numbers


class BillfishConfig(QuantizationConfig):  # type: ignore[misc]
    def __init__(self, source: dict[str, Any]) -> None:
        super().__init__()
        self.source, self.dialect = source, read_dialect(source)
        self.directory: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dialect": None}  # its patterns cannot be sent to another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, dialect=read_dialect(state["source"]))

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # it is in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BillfishConfig":
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """quantization="billfish" takes checkpoints of other formats over."""
        return METHOD if user_quant == METHOD else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        return WeightsMapper()  # vLLM's own drops g_idx

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Raise if the tensors of a directory are not those of its model: vLLM leaves what is
        missing from a quantized checkpoint as it happens to be in memory."""
        if Path(model_name).is_dir():
            check(model_name)
            self.directory = model_name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            schemes = self._schemes(prefix)
            packed = {name: scheme for name, scheme in schemes.items() if scheme is not None}
            if not packed:
                return UnquantizedLinearMethod()
            if len(packed) < len(schemes):
                dense = ", ".join(sorted(set(schemes) - set(packed)))
                raise UserError(
                    f"{prefix}: vLLM runs {', '.join(schemes)} as one layer, and {dense} is not "
                    "quantized while the others are. Quantize all of them or none."
                )
            return BillfishLinearMethod(self, packed)
        if isinstance(layer, ParallelLMHead) and self.dialect.scheme(prefix) is not None:
            raise UserError(
                f"{prefix}: is quantized, and Billfish runs no packed head in vLLM. Quantize the "
                "model without --head-bits."
            )
        if isinstance(layer, RoutedExperts) and self._packs_experts(layer, prefix):
            raise UserError(
                f"{prefix}: its experts are quantized, which Billfish does not run in vLLM. For "
                "w4a16 leave the model to vLLM: without quantization='billfish'."
            )
        return None

    def _packs_experts(self, layer: Any, prefix: str) -> bool:
        leaves = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        modules = product(range(layer.global_num_experts), leaves)
        return any(self.dialect.scheme(f"{prefix}.{expert}.{leaf}") for expert, leaf in modules)

    def _schemes(self, prefix: str) -> dict[str, Scheme | None]:
        """The linears of the checkpoint that vLLM merged into this layer, in their order."""
        parent, dot, name = prefix.rpartition(".")
        modules = [f"{parent}{dot}{each}" for each in self.packed_modules_mapping.get(name, [name])]
        return {module: self.dialect.scheme(module) for module in modules}


class BillfishLinearMethod(LinearMethodBase):  # type: ignore[misc]
    def __init__(self, config: BillfishConfig, schemes: dict[str, Scheme]) -> None:
        self.dialect, self.directory, self.schemes = config.dialect, config.directory, schemes

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Empty parameters under the names of the checkpoint, whose loaders hand its tensors to
        parallel.Layer; raises a UserError if the layer cannot be split like this."""
        modules, sizes = list(self.schemes), output_partition_sizes
        replicas = [1] * len(sizes)
        if hasattr(layer, "num_kv_head_replicas"):
            replicas[1:] = [layer.num_kv_head_replicas] * (len(sizes) - 1)
        if len(modules) not in (1, len(sizes)):
            raise UserError(
                f"{layer.prefix}: the checkpoint has {len(modules)} linears ({', '.join(modules)}) "
                f"for the {len(sizes)} parts of this layer; expected one or one for each."
            )
        ranks = output_size // sum(sizes)  # 1: a replicated layer, or one that is split by inputs
        stored = []
        for index, module in enumerate(modules):
            here = slice(None) if len(modules) == 1 else slice(index, index + 1)
            if input_size_per_partition != input_size:
                slices = Slices.of_inputs(output_size, input_size, layer.tp_rank, layer.tp_size)
            else:
                rank = layer.tp_rank if ranks > 1 else 0
                slices = Slices.of_outputs(input_size, sizes[here], replicas[here], rank, ranks)
            scheme = self.schemes[module]
            stored.append(Stored(module, self.dialect, scheme, slices, params_dtype))
            if self.directory is not None:
                checkpoint, names = _opened(self.directory)
                stored[-1].rehearse(small_tensors(checkpoint, self.dialect, scheme, names[module]))
        layer.billfish = Layer(stored)
        for name, spec in layer.billfish.specs.items():
            parameter = nn.Parameter(torch.empty(0, dtype=spec.dtype), requires_grad=False)
            parameter.weight_loader = _loader(layer.billfish, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        waiting: Layer = layer.billfish
        names = list(waiting.specs)
        device = getattr(layer, names[0]).device
        compile_kernels(set(self.schemes.values()), layer.params_dtype, device)
        layer.billfish = waiting.product(device)
        for name in names:
            delattr(layer, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = layer.billfish(x, bias)
        return y


@cache
def _opened(directory: str) -> tuple[Checkpoint, dict[str, dict[str, str]]]:
    """The checkpoint's headers, and the tensors of its modules by name."""
    checkpoint = Checkpoint(directory)
    return checkpoint, by_module(checkpoint)


def _loader(layer: Layer, name: str) -> Any:
    """The loader of a parameter. vLLM names the part of a merged layer by an argument or by an
    attribute of the tensor."""

    def load(parameter: nn.Parameter, tensor: Tensor, shard: str | int | None = None) -> None:
        part: Any = getattr(tensor, "shard_id", None) if shard is None else shard
        layer.take(QKV.get(part, part or 0), name, tensor)

    return load


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(BillfishConfig)
