"""Names in the files and in the model: transformers renames some tensors when it loads them
(Mixtral's `block_sparse_moe.gate` is `mlp.gate`, gamma is weight), and adds or drops the prefix of
the base model. Its own rules are applied here."""

from collections.abc import Iterable
from typing import Any

from transformers import conversion_mapping, core_model_loading

renamings_of: Any = conversion_mapping.get_model_conversion_mapping
rename: Any = core_model_loading.rename_source_key
in_order: Any = core_model_loading.dot_natural_key


def names_in_files(model: Any, held: Iterable[str]) -> dict[str, str]:
    """Name of a tensor of the model -> its name in the files, for those that are stored alone."""
    rules = [r for r in renamings_of(model) if isinstance(r, core_model_loading.WeightRenaming)]
    known, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    found: dict[str, str] = {}
    for name in sorted(held, key=in_order):
        renamed = rename(name, rules, [], prefix, known)[0]
        if renamed not in known:
            renamed = rename(name, [], [], prefix, known)[0]
        if renamed in known:
            found.setdefault(renamed, name)
    return found
