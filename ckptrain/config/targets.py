"""Which linear layers get an adapter? From the names in the config to Megatron modules, by global layer number.

Megatron numbers layers from 0 on each pipeline stage, so a wildcard with a layer number would choose other layers on
each; here every name is global, and the model's owner translates a local name before it asks `selects`.

All experts of a layer are adapted or none. Their modules are listed once a layer, as `mlp.experts.linear_fc1`, without
the `local_experts.E` that Megatron has where each expert is a module of its own.

Where every part of a fused layer has an adapter of its own (canonical LoRA, DoRA), the parts are what is listed:
`self_attention.linear_q` and not `self_attention.linear_qkv`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import attrs

from ckptrain.config.linear import is_expert
from ckptrain.config.modules import ALL_LINEAR, FUSED, MODULE_NAMES, SPLIT, fused_name, split_names
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.values import suggestion
from ckptrain.errors import ConfigError

_EXPERT = re.compile(r"\.(?:experts\.local_experts|local_experts|experts)\.(\*|\d+)(?=\.)")
_WRAPPER = "module."  # what data parallelism and mixed precision put before a name


@attrs.frozen(kw_only=True)
class Targets:
    """The modules to adapt, by global name and in order, and what to tell the user about how they were chosen."""

    modules: tuple[str, ...]
    notes: tuple[str, ...] = ()
    _by_layer: dict[str, tuple[str, ...]] = attrs.field(init=False, eq=False, repr=False)

    @_by_layer.default
    def _group(self) -> dict[str, tuple[str, ...]]:
        found = defaultdict(list)
        for module in self.modules:
            place, _, short = module.rpartition(".")
            found[f"{place}.{fused_name(short)}"].append(short)
        return {layer: tuple(shorts) for layer, shorts in found.items()}

    def adapted(self, global_name: str) -> tuple[str, ...]:
        """Return by short name what of a Megatron layer is to be adapted: nothing, the layer itself, or parts of it.

        An expert may be named with its number or without.
        """
        while global_name.startswith(_WRAPPER):
            global_name = global_name.removeprefix(_WRAPPER)
        return self._by_layer.get(_EXPERT.sub(".experts", global_name), ())

    def selects(self, global_name: str) -> bool:
        """Tell whether a Megatron layer is to be adapted, whole or in part."""
        return bool(self.adapted(global_name))


@attrs.frozen(kw_only=True)
class _Module:
    """A linear layer under its Megatron name, and the Hugging Face names of the layers that it holds."""

    name: str
    short: str
    parts: tuple[str, ...]

    @property
    def split(self) -> dict[str, str]:
        """Return the global name of each part as a module of its own, by the short Hugging Face name."""
        place = self.name.removesuffix(self.short)
        return {part: f"{place}{name}" for part, name in split_names(self.short).items()}

    def matched_parts(self, pattern: str) -> frozenset[str]:
        """Return the Hugging Face layers, by short name, that `pattern` means here: all, if it names the whole."""
        matches = _wildcard(pattern)
        if pattern in (self.short, ALL_LINEAR) or matches(self.name):
            return frozenset(FUSED[self.short])
        split = {part for part, name in self.split.items() if pattern == name.rpartition(".")[2] or matches(name)}
        # As in PEFT, a name means every layer that it is the end of.
        return frozenset(split) | {
            part.rpartition(".")[2] for part in self.parts if matches(part) or f".{part}".endswith(f".{pattern}")
        }


def adaptable_modules(shape: ModelShape) -> tuple[str, ...]:
    """Return the global Megatron name of every linear layer that can be adapted, layer by layer."""
    return tuple(module.name for module in _modules(shape))


def resolve_targets(lora: LoraConfig, shape: ModelShape) -> Targets:
    """Find the modules that `lora` chooses in a model of this shape.

    Names are Megatron's (`linear_qkv`), Hugging Face's (`q_proj`), wildcards or full names in either notation, or
    `all-linear`. An empty `target_modules` means every linear layer of the decoder but `exclude_modules`.

    Raises:
        ConfigError: names that match nothing, each with a suggestion, a choice that leaves nothing to adapt, or one of
            what this kind of adapter cannot be given to.
    """
    modules = _modules(shape)
    key = "lora.target_modules" if lora.target_modules else "lora.exclude_modules"
    patterns = lora.target_modules or lora.exclude_modules
    chosen, notes, problems = _choose(key, patterns, modules, split=lora.splits_fused)
    if not lora.target_modules:
        every = [name for module in modules for name in (module.split.values() if lora.splits_fused else [module.name])]
        chosen = [name for name in every if name not in set(chosen)]
        if not chosen and not problems:
            problems = [f"lora.exclude_modules: {', '.join(patterns)} leaves no module to adapt"]
    if problems:
        raise ConfigError("cannot choose the modules to adapt", [*problems, _what_there_is(shape)])
    if not shape.adapts_experts and (experts := [name for name in chosen if is_expert(name)]):
        raise ConfigError(
            "cannot choose the modules to adapt",
            [
                f"{key if patterns else 'lora.target_modules'} selects {experts[0]}: {shape.architecture} has all"
                " experts of a layer in one tensor, and PEFT passes over adapters of single ones; set"
                " lora.target_modules=[linear_qkv, linear_proj]"
            ],
        )
    if lora.has_magnitudes and (experts := [name for name in chosen if is_expert(name)]):
        raise ConfigError(
            "cannot choose the modules to adapt",
            [
                f"lora.kind=dora, and {key if patterns else 'lora.target_modules'} selects {experts[0]}: PEFT has no"
                " DoRA of stacked experts; set lora.target_modules=[linear_qkv, linear_proj], or lora.kind=canonical"
            ],
        )
    return Targets(modules=tuple(chosen), notes=tuple(notes))


def _modules(shape: ModelShape) -> list[_Module]:
    mlp = "mlp.experts" if shape.num_experts else "mlp"  # in both notations
    places = {
        "linear_qkv": ("self_attention", "self_attn"),
        "linear_proj": ("self_attention", "self_attn"),
        "linear_fc1": (mlp, mlp),
        "linear_fc2": (mlp, mlp),
    }
    return [
        _Module(
            name=f"decoder.layers.{layer}.{place}.{short}",
            short=short,
            parts=tuple(f"model.layers.{layer}.{hf_place}.{part}" for part in FUSED[short]),
        )
        for layer in range(shape.num_layers)
        for short, (place, hf_place) in places.items()
    ]


def _choose(
    key: str, patterns: Sequence[str], modules: list[_Module], *, split: bool
) -> tuple[list[str], list[str], list[str]]:
    """Match every pattern; returns the names of what is chosen, notes on fused layers, and problems."""
    parts: dict[str, set[str]] = {module.name: set() for module in modules}
    by: dict[str, list[str]] = {module.name: [] for module in modules}
    problems = []
    for written in patterns:
        expert = _EXPERT.search(written)
        if expert and expert[1] != "*":
            problems.append(
                f"{key}: {written} names one expert, but all of a layer are adapted or none: write * for it"
            )
            continue
        pattern = _EXPERT.sub(".experts", written)
        matched = False
        for module in modules:
            if found := module.matched_parts(pattern):
                matched = True
                parts[module.name] |= found
                by[module.name].append(written)
        if not matched:
            problems.append(f"{key}: {written} matches nothing{suggestion(written.rpartition('.')[2], MODULE_NAMES)}")
    if split:
        by_part = [(part, name, module) for module in modules for part, name in module.split.items()]
        return [name for part, name, module in by_part if part in parts[module.name]], [], problems
    chosen = [module for module in modules if parts[module.name]]
    also = "is adapted too" if key == "lora.target_modules" else "is left out too"
    return [module.name for module in chosen], _fusion_notes(key, chosen, parts, by, also), problems


def _fusion_notes(
    key: str, chosen: Iterable[_Module], parts: dict[str, set[str]], by: dict[str, list[str]], also: str
) -> list[str]:
    """Say once for each case which parts of a fused layer come along unasked."""
    notes: dict[str, None] = {}
    for module in chosen:
        extra = [part for part in FUSED[module.short] if part not in parts[module.name]]
        if extra:
            fused = _listing(FUSED[module.short]).replace("_proj", "")
            verb = also if len(extra) == 1 else also.replace("is", "are", 1)
            asked = ", ".join(by[module.name])
            note = (
                f"{key}: {asked}: Megatron fuses {fused} in {module.short}, so {_listing(extra)} {verb};"
                " lora.kind=canonical gives each an adapter of its own"
            )
            notes[note] = None
    return list(notes)


def _wildcard(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Match whole names, `*` for any text, as wildcard_match of megatron/bridge/peft/utils.py; but a dot is a dot."""
    return re.compile(".*".join(re.escape(piece) for piece in pattern.split("*"))).fullmatch


def _listing(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _what_there_is(shape: ModelShape) -> str:
    names = ", ".join(name for name in MODULE_NAMES if name not in SPLIT)
    examples = ", ".join(adaptable_modules(shape)[:4])
    return f"this model has {names} in layers 0 to {shape.num_layers - 1}; full names are such as {examples}"
