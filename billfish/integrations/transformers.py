"""Packed checkpoints in transformers: from_pretrained loads them into QuantLinear modules.

Billfish loads compressed-tensors (pack-quantized), GPTQ, AWQ, Marlin and its own checkpoints,
without the packages that wrote them. Configs that `read_dialect` cannot read, and calls that pass a
quantization_config, go to transformers' own quantizer. A missing tensor, or one of another shape,
is an error: no weight is left random. save_pretrained writes the dialect that `quantize` writes,
whichever was loaded.
"""

import copy
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from billfish.checkpoints.dialects import dialect_of, read_dialect
from billfish.checkpoints.experts import is_fusing
from billfish.checkpoints.header import read_header
from billfish.checkpoints.match import problems, refuse
from billfish.checkpoints.own import METHOD
from billfish.checkpoints.packed import unpacked
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.models.compute import compute_dtype, cpu_type, name_of
from billfish.models.experts import split_experts
from billfish.models.linear import QuantLinear
from billfish.models.names import names_in_files
from billfish.schemes.base import Scheme
from billfish.schemes.dialect import Dialect, refuse_unknown
from billfish.schemes.registry import compile_kernels

logger = logging.get_logger(__name__)
# Whether transformers lets a quantizer choose how tensors are converted as they are loaded.
LOADS_EXPERTS = hasattr(HfQuantizer, "update_weight_conversions")


class BillfishConfig(QuantizationConfigMixin):
    """A checkpoint's quantization_config, unchanged."""

    quant_method: Any  # transformers' annotation is an enum; any string works

    def __init__(self, **source: Any) -> None:
        self.quant_method = METHOD
        self.source = source

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.source)


class StoredLinear(nn.Module):
    """Placeholder for a linear while the checkpoint is read: holds its tensors under their names in
    the file."""

    def __init__(
        self,
        dialect: Dialect,
        scheme: Scheme,
        linear: nn.Linear,
        bias: bool,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """`dtypes` are those in the file, so that loading does not cast scales to the model's
        dtype."""
        super().__init__()
        self.dialect, self.scheme = dialect, scheme
        self.n, self.k, self.dtype = linear.out_features, linear.in_features, linear.weight.dtype
        self.bias_expected = linear.bias is not None
        for name, spec in dialect.stored(scheme, self.n, self.k, self.dtype).items():
            if name in dialect.optional and name not in dtypes:
                continue  # transformers would report it as missing and randomly initialized
            if spec.dtype.is_floating_point:
                spec = replace(spec, dtype=dtypes.get(name, spec.dtype))
            self.register_buffer(name, spec.empty("meta"))
        empty = torch.empty(self.n, dtype=self.dtype, device="meta")
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None

    @property
    def weight(self) -> Tensor:
        """For models that initialize a linear's weight from outside; nothing is drawn."""
        weight = torch.empty(self.n, self.k, dtype=self.dtype, device="meta")
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def arrange(self) -> QuantLinear:
        """The QuantLinear with these tensors; the placeholder gives them up."""
        stored = {
            name: tensor
            for name, tensor in self._buffers.items()
            if tensor is not None and was_loaded(tensor)
        }
        self._buffers.clear()
        scheme = self.dialect.resolve_scheme(self.scheme, stored)
        tensors = self.dialect.to_canonical(scheme, stored, self.n, self.k)
        device = stored[self.dialect.words].device
        bias = self.bias
        if bias is not None and not was_loaded(bias):
            raise UserError("bias is missing. The checkpoint is incomplete: copy it again.")
        if bias is not None and not self.bias_expected and not bool(bias.any()):
            bias = None  # AutoGPTQ writes zero biases for models without bias
        linear = QuantLinear(scheme, self.n, self.k, dtype=self.dtype, device="meta")
        linear.bias = bias
        # CPU kernels take scales of any dtype; the fastest GPU kernels need the activations' dtype.
        cast = self.dtype if device.type != "cpu" else None
        linear.set_tensors(
            {
                name: tensor.to(device, cast if tensor.is_floating_point() else None)
                for name, tensor in tensors.items()
            }
        )
        linear.arrange()
        return linear


class BillfishQuantizer(HfQuantizer):
    requires_calibration = True  # loads packed checkpoints only; `billfish quantize` makes them

    def __init__(self, quantization_config: BillfishConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config
        self.dialect = read_dialect(quantization_config.source)

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.dtype = model.dtype
        warn_if_slow(self.dtype, kwargs.get("device_map"))
        self.files = [file for file in checkpoint_files or () if file.endswith(".safetensors")]
        held = tensor_dtypes(self.files)
        experts = tuple(f"{name}." for name in split_experts(model))
        parts: dict[str, dict[str, torch.dtype]] = {}
        for tensor, dtype in held.items():
            owner, _, part = tensor.rpartition(".")
            parts.setdefault(owner, {})[part] = dtype
        in_files = names_in_files(model, (f"{owner}.weight" for owner in parts))
        tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            in_file = in_files.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
            if in_file != name and name.startswith(experts) and not LOADS_EXPERTS:
                raise UserError(
                    f"{in_file}: transformers {transformers_version} fuses experts whose names in "
                    f"the files are not the model's ({name}), packed or not. Install a newer one: "
                    "pip install 'transformers>=5.8'."
                )
            packed = f"{in_file}.{self.dialect.words}" in held
            scheme = self.dialect.scheme(in_file)
            if packed and scheme is None:
                raise UserError(
                    f"{in_file}: the file holds it packed, the quantization_config says it is not "
                    "quantized. One of them belongs to another checkpoint."
                )
            if packed and f"{name}.weight" in tied:
                raise UserError(
                    f"{in_file}: the file holds it packed, config.json ties it to another weight. "
                    "Set tie_word_embeddings to false in config.json."
                )
            # If the file holds a dense weight, the layer is dense: GPTQ configs do not list such
            # layers.
            dense = f"{in_file}.weight" in held or f"{name}.weight" in tied
            if scheme is None or (dense and not packed):
                continue
            try:
                refuse_unknown(self.dialect, scheme, parts.get(in_file, ()) if packed else ())
            except UserError as error:
                raise UserError(f"{in_file}: {error}") from None
            bias = module.bias is not None or f"{in_file}.bias" in held
            stored = StoredLinear(self.dialect, scheme, module, bias, parts.get(in_file, {}))
            replace_module(model, name, stored)

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        """Experts are loaded one by one, as files hold them; transformers would fuse them. It asks
        from 5.8 on, and gives the model from 5.21 on."""
        kept = [rule for rule in weight_conversions if not is_fusing(rule)]
        return super().update_weight_conversions(kept, *model)  # type: ignore[no-untyped-call]

    def _refuse_unread(self, model: Any) -> None:
        """Raise if no module takes a tensor of the files. A class that config.json does not name,
        such as the base model without its head, may leave some unread."""
        if self.files and type(model).__name__ in (model.config.architectures or ()):
            checkpoint = Checkpoint.of_files(self.files)
            shapes, spare = unpacked(checkpoint, self.dialect)
            refuse(checkpoint, problems(checkpoint, shapes, spare, type(model), model.config))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        cast_renamed(model, self.dtype, tensor_dtypes(self.files))
        waiting = [(n, m) for n, m in model.named_modules() if isinstance(m, StoredLinear)]
        schemes: dict[str, Scheme] = {}
        prepare_kernels(waiting)
        for name, module in waiting:
            if hasattr(module, "_hf_hook"):
                raise UserError(
                    f"{name}: the model was spread over several devices, which packed layers do "
                    'not support yet. Pass one device, for example device_map="cpu".'
                )
            try:
                linear = module.arrange()
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
            schemes[name] = linear.scheme
            replace_module(model, name, linear)
        refuse_random(model)
        self._refuse_unread(model)
        if schemes:
            self._describe(model, schemes)
        return model

    def _describe(self, model: Any, schemes: dict[str, Scheme]) -> None:
        """Set the config that save_pretrained writes: the checkpoint's own if it describes the
        tensors that will be written, else a new one."""
        ignore = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        writer = dialect_of(schemes.values())
        if isinstance(self.dialect, writer):
            known = {name: self.dialect.scheme(name) for name in (*schemes, *ignore)}
            if known == {**dict.fromkeys(ignore), **schemes}:
                return
        self.config.source = writer.config(schemes, ignore)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def tensor_dtypes(files: Iterable[str]) -> dict[str, torch.dtype]:
    return {name: entry.dtype for f in files for name, entry in read_header(Path(f)).items()}


def cast_renamed(model: nn.Module, dtype: torch.dtype, held: Container[str]) -> None:
    """Up to 5.21 transformers leaves tensors of quantized models that have other names in the files
    (Mixtral's router) in their 16-bit type there."""
    for name, parameter in model.named_parameters():
        if name not in held and parameter.is_floating_point() and parameter.itemsize == 2:
            parameter.data = parameter.data.to(dtype)


def was_loaded(tensor: Tensor) -> bool:
    """transformers marks every tensor that it takes from a checkpoint, so as not to initialize it.

    Tensors that it does not find are torch.empty without the mark, and only a warning tells. If a
    version drops the mark, every load fails with an error instead of running random weights.
    """
    return bool(getattr(tensor, "_is_hf_initialized", False))


def warn_if_slow(dtype: torch.dtype, device_map: Any) -> None:
    """transformers loads in the dtype of config.json even where the CPU is slow in it. No warning
    if the model may still move to a GPU: without a device_map where there is one."""
    devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
    stays = devices == {"cpu"} or not (devices or torch.cuda.is_available())
    if stays and dtype != (fast := compute_dtype(dtype, "cpu")):
        logger.warning_once(
            f"the model is loaded in {name_of(dtype)}, in which this CPU is slow: {cpu_type().why}."
            f" Pass dtype=torch.{name_of(fast)} to from_pretrained, or use billfish.load, which "
            "chooses."
        )


def prepare_kernels(waiting: Sequence[tuple[str, StoredLinear]]) -> None:
    """Compile the kernels of all layers on a GPU together, instead of one by one as layers need
    them."""
    needed: dict[tuple[torch.device, torch.dtype], set[Scheme]] = {}
    for _, module in waiting:
        device = next((t.device for t in module.buffers() if t.device.type == "cuda"), None)
        if device is not None:
            needed.setdefault((device, module.dtype), set()).add(module.scheme)
    for (device, dtype), schemes in needed.items():
        compile_kernels(schemes, dtype, device, logger.warning)


def refuse_random(model: Any) -> None:
    """Raise if a parameter was neither in the checkpoint nor tied to one that was."""
    excused = [re.compile(p) for p in model._keys_to_ignore_on_load_missing or ()]
    random = [
        name
        for name, parameter in model.named_parameters()
        if not was_loaded(parameter) and not any(p.search(name) for p in excused)
    ]
    if random:
        raise UserError(
            f"the checkpoint does not hold {', '.join(random[:4])}"
            + (f" and {len(random) - 4} more" if len(random) > 4 else "")
            + ": these would be random. It is incomplete, or packs layers that this model class "
            "does not have as linears (fused experts), or belongs to another model class."
        )


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def register() -> None:
    """Make transformers use Billfish for the configs that it can read; called when transformers'
    quantizers are imported. Idempotent."""
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    own = auto.AutoHfQuantizer.merge_quantization_configs

    def merge(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config, dict) and quantization_config_from_args is None:
            try:
                read_dialect(quantization_config)
                return BillfishConfig(**quantization_config)
            except UserError as error:
                logger.info(f"Billfish leaves this checkpoint to transformers. {error}")
        return own(quantization_config, quantization_config_from_args)

    auto.AutoHfQuantizer.merge_quantization_configs = classmethod(merge)  # type: ignore[method-assign, assignment]
    auto.register_quantization_config(METHOD)(BillfishConfig)
    auto.register_quantizer(METHOD)(BillfishQuantizer)
