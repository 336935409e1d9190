"""What a family of models computes under Megatron and under Hugging Face: each comparison is a function of a case.

Every number is the largest difference of two logits of one probe, in float32 on the CPU, for a tiny random model. What
a family cannot do is answered by ckptrain itself: the reasons are its own errors.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from forked import launch
from torch import Tensor

from ckptrain.config.base import Base, read_json
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape, read_shape
from ckptrain.errors import CkptrainError, ProblemsError

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "TP=1": (1, ()),
    "TP=2": (2, ("parallel.tensor=2",)),
    "PP=2": (2, ("parallel.pipeline=2",)),
}
"""World size and configuration, by name."""
LEAST_EFFECT = 1e-2
"""By how much a random adapter must move the logits for a comparison to mean anything."""
_SCRATCH = re.compile(r"[^\s]*/ckptrain-families-[^/\s]+/[^/\s]+/")  # where a run of this tool keeps its models


@attrs.frozen(kw_only=True)
class Case:
    """A model of one family, and a directory for what is made of it."""

    name: str
    base: Path
    work: Path
    targets: tuple[str, ...] = ()
    """Overrides that choose the adapted layers; none for all."""

    def config(self, *overrides: str) -> RunConfig:
        """Return the configuration of a run on the base, whose adapters have an effect from the start."""
        data = self.work / "chats.jsonl"
        return load_config(
            {
                "model": {"pretrained": str(self.base), "dtype": "float32", "verify": "never"},
                "lora": {"dim": 4, "alpha": 8, "lora_B_init_method": "xavier"},
                "data": {"train": str(data), "sequence_length": 128},
                "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 2},
            },
            [*self.targets, *overrides],
        )

    def saved(self, layout: str) -> Path:
        """Return where the checkpoint of a layout lies."""
        return self.work / layout

    def exported(self, layout: str) -> Path:
        """Return where the PEFT directory of a layout lies."""
        return self.work / f"{layout}-peft"


@attrs.frozen(kw_only=True)
class Refusal:
    """What ckptrain said instead of a number."""

    reason: str


type Outcome = float | Refusal
type Cell = Callable[[Case], float]


def reason_of(error: CkptrainError) -> str:
    """Return what an error says, in one line."""
    problems = error.problems if isinstance(error, ProblemsError) else []
    headline = str(error).partition("\n")[0]
    return _SCRATCH.sub("", f"{headline}: {'; '.join(problems)}" if problems else headline)


def attempt(measure: Callable[[], float]) -> Outcome:
    """Return a number, or why there is none."""
    try:
        return measure()
    except CkptrainError as error:
        return Refusal(reason=reason_of(error))


def on_ranks(world_size: int, act: Callable[[], Any]) -> list[Any]:
    """Run something on ranks of its own, where it may open process groups.

    Raises:
        CkptrainError: what the first rank raised that failed.
    """

    def told() -> Any:
        quiet()
        try:
            return act()
        except CkptrainError as error:
            return error

    results = launch(world_size, told)
    for result in results:
        if isinstance(result, CkptrainError):
            raise result
    return results


def quiet() -> None:
    """Keep warnings and progress bars of libraries out of the way."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def set_up_and_look(case: Case, layout: str, look: Callable[[Any, Any], Any]) -> list[Any]:
    """Set the model up with random adapters under a layout, and return what `look` makes of it on each rank."""
    world_size, overrides = LAYOUTS[layout]

    def on_rank() -> Any:
        from ckptrain.lifecycle.phases import Lifecycle, Phase
        from ckptrain.megatron.world import open_process_group
        from ckptrain.training.observers import Observer
        from ckptrain.training.setup import model_parallel, set_up_model
        from ckptrain.training.start import survey_run

        survey = survey_run(case.config(*overrides), world_size)
        with open_process_group(), model_parallel(survey):
            lifecycle = Lifecycle()
            lifecycle.advance(Phase.PLANNED)
            return look(survey, set_up_model(survey, lifecycle, Observer()))

    return on_ranks(world_size, on_rank)


def logits_and_checkpoint(case: Case, layout: str) -> Tensor:
    """Return the logits of the probe under a layout, with random adapters, and leave a checkpoint of them."""

    def look(survey: Any, setup: Any) -> Any:
        from ckptrain.convert.parity import megatron_logits, probe_batch
        from ckptrain.training.saving import Position, Saver
        from ckptrain.training.setup import set_up_data

        size = survey.shape.vocab_size
        logits = megatron_logits(setup.model, probe_batch(size), size)
        with Saver(survey, set_up_data(survey), setup, case.saved(layout), "family-table") as saver:
            saver.begin(Position(step=1, consumed_samples=0, consumed_tokens=0), {})
            saver.wait()
        return logits.numpy()

    return torch.from_numpy(set_up_and_look(case, layout, look)[0])


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two logits."""
    return (found - expected).abs().max().item()


def peft_logits_of(case: Case, adapter: Path) -> Tensor:
    """Return Hugging Face's logits of the probe with a PEFT adapter, which must be one that does something."""
    from ckptrain.convert.compare import peft_logits
    from ckptrain.convert.parity import probe_batch

    alone, adapted = peft_logits(case.base, adapter, probe_batch(shape(case.base).vocab_size))
    assert apart(adapted, alone) > LEAST_EFFECT, f"{adapter} changes nothing, so nothing would be shown by it"
    return adapted


def shape(directory: Path) -> ModelShape:
    """Return the dimensions of a base."""
    return read_shape(Base(name=directory.name, kind="directory", path=directory, revision=None))


def base_cell(case: Case) -> float:
    """Compare the base alone."""
    from ckptrain.convert.parity import check_base

    def look(survey: Any, setup: Any) -> float:
        for adapter in setup.adapters:
            adapter.parameter.data.zero_()
        model, device = setup.model, torch.device("cpu")
        parity = check_base(model, case.base, survey.shape, verify="always", dtype=torch.float32, device=device)
        assert parity.max_difference is not None
        return float(parity.max_difference)

    return float(set_up_and_look(case, "TP=1", look)[0])


def adapted_cell(case: Case, layout: str) -> float:
    """Compare the exported adapter under PEFT with Megatron's logits at the layout that saved it."""
    from ckptrain.convert.to_peft import export_adapter

    trained = logits_and_checkpoint(case, layout)
    export_adapter(case.saved(layout), case.exported(layout))
    return apart(peft_logits_of(case, case.exported(layout)), trained)


def exported_cell(case: Case) -> float:
    """Return the number that the gate of an export lets it through by."""
    from ckptrain.convert.to_peft import export_adapter

    def on_rank() -> float:
        gate = export_adapter(case.saved("TP=1"), case.work / "gated-peft", verify=True).gate
        assert gate is not None
        return gate.difference

    return float(on_ranks(1, on_rank)[0])


def merged_cell(case: Case) -> float:
    """Return the number that the gate of a merge lets it through by."""
    from ckptrain.convert.merge import merge_adapter

    def on_rank() -> float:
        gate = merge_adapter(case.saved("TP=1"), case.work / "merged", verify=True).gate
        assert gate is not None
        return gate.difference

    return float(on_ranks(1, on_rank)[0])


def imported_cell(case: Case) -> float:
    """Compare an adapter under PEFT with what Megatron computes once it is imported.

    It is one that PEFT made and saved itself; where experts are adapted, which PEFT saves in a form of its own, it is
    the one that was exported.
    """
    if adapts_experts(case):
        return imported(case, case.exported("TP=1"), case.work / "imported")
    make_peft_adapter(case, case.work / "made-by-peft")
    return imported(case, case.work / "made-by-peft", case.work / "imported")


def imported(case: Case, adapter: Path, out: Path) -> float:
    """Import a PEFT adapter and compare logits."""
    from ckptrain.convert.compare import adapted_megatron_logits
    from ckptrain.convert.from_peft import import_adapter
    from ckptrain.convert.parity import probe_batch
    from ckptrain.convert.sources import open_source

    def on_rank() -> Any:
        import_adapter(adapter, out, base=str(case.base))
        batch = probe_batch(shape(case.base).vocab_size)
        return adapted_megatron_logits(open_source(out), case.base, batch).numpy()

    return apart(torch.from_numpy(on_ranks(1, on_rank)[0]), peft_logits_of(case, adapter))


def make_peft_adapter(case: Case, directory: Path) -> None:
    """Let PEFT adapt the layers that the export adapts, with random matrices, and save that."""
    from peft import LoraConfig, get_peft_model

    from ckptrain.convert.parity import load_huggingface

    targets = read_json(case.exported("TP=1") / "adapter_config.json")["target_modules"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = get_peft_model(load_huggingface(case.base, torch.float32, torch.device("cpu")), config)
    model.save_pretrained(directory)


def adapts_experts(case: Case) -> bool:
    """Tell whether experts of the case are adapted."""
    from ckptrain.config.targets import resolve_targets

    modules = resolve_targets(case.config().lora, shape(case.base)).modules
    return any(".experts." in name for name in modules)


def refuses_experts_of_peft(case: Case) -> str | None:
    """Return why an adapter of experts that PEFT made is not imported; None where it is, or where there are none."""
    if not adapts_experts(case):
        return None
    make_peft_adapter(case, case.work / "experts-by-peft")
    found = attempt(lambda: imported(case, case.work / "experts-by-peft", case.work / "imported-experts"))
    return found.reason if isinstance(found, Refusal) else None


COLUMNS: Mapping[str, Cell] = {
    "base": base_cell,
    "adapters, TP=1": lambda case: adapted_cell(case, "TP=1"),
    "adapters, TP=2": lambda case: adapted_cell(case, "TP=2"),
    "adapters, PP=2": lambda case: adapted_cell(case, "PP=2"),
    "exported": exported_cell,
    "imported": imported_cell,
    "merged": merged_cell,
}
"""The order matters: later cells use what earlier ones wrote."""


def refuses_experts(case: Case) -> str | None:
    """Return why the experts of a family cannot be adapted; None where they can, or where there are none."""
    if not shape(case.base).num_experts:
        return None
    experts = attrs.evolve(case, targets=("lora.target_modules=['*.experts.*']",))

    def look(survey: Any, setup: Any) -> float:
        from ckptrain.convert.parity import megatron_logits, probe_batch

        size = survey.shape.vocab_size
        return megatron_logits(setup.model, probe_batch(size), size).abs().max().item()

    found = attempt(lambda: float(set_up_and_look(experts, "TP=1", look)[0]))
    return found.reason if isinstance(found, Refusal) else None


def refuses_transformer_engine(architecture: str) -> str | None:
    """Return why Transformer Engine's layers are not used for a family; None where they are."""
    from transformers import LlamaConfig

    from ckptrain.megatron.families import family_settings

    found = attempt(lambda: len(family_settings(LlamaConfig(), architecture, "transformer_engine")))
    return found.reason if isinstance(found, Refusal) else None
