"""From a survey to a model that can train: base, adapters, optimizer, data, each with its phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import attrs

from ckptrain.checkpoint.ranks import on_rank0, together
from ckptrain.convert.parity import BaseParity, check_base
from ckptrain.convert.pretrained import local_directory
from ckptrain.data.batches import BatchLayout, BatchSource, MicroBatch, validation_batches
from ckptrain.data.chat import Prompt, Sample, prompt_of
from ckptrain.data.dataset import Dataset, build_datasets, build_validation
from ckptrain.data.stream import StreamSource, samples_of_rows
from ckptrain.data.tokenise import Tokenisation
from ckptrain.errors import DataError
from ckptrain.lifecycle.facts import DataIdentity
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.megatron import world
from ckptrain.megatron.adapters import AdapterParameter, adapter_parameters, attach_adapters, initialise_adapters
from ckptrain.megatron.fused.choice import apply_choice, choose_layers
from ckptrain.megatron.model import build_model, load_base_weights, open_bridge, torch_dtype
from ckptrain.megatron.optimizer import build_optimizer, wrap_for_training
from ckptrain.megatron.platform import choose_backend, enter_platform, reproducible
from ckptrain.megatron.state import AdapterStore
from ckptrain.training.observers import Observer
from ckptrain.training.program import rows_of
from ckptrain.training.revisions import identify_data
from ckptrain.training.start import Survey
from ckptrain.training.startup import StartClock
from ckptrain.training.tokens import tokenisation


@attrs.frozen(kw_only=True)
class DataSetup:
    """The data of this rank."""

    train: Dataset | None
    """None where a program makes the samples of each step."""
    validation: Dataset | None
    identity: DataIdentity
    """That of the survey, with the counts that are known now."""
    source: BatchSource | StreamSource
    validation_batches: tuple[MicroBatch, ...]
    prompt: Prompt | None
    tokenizer: Any


@attrs.frozen(kw_only=True)
class ModelSetup:
    """The model of this rank, ready to train or to be restored."""

    model: Any
    """megatron-core's wrapped model."""
    adapters: tuple[AdapterParameter, ...]
    store: AdapterStore
    optimizer: Any
    parity: BaseParity


@contextlib.contextmanager
def model_parallel(survey: Survey) -> Iterator[None]:
    """Open megatron-core's groups for the survey's layout, and close them."""
    with reproducible(survey.config.train.deterministic):
        world.open_model_parallel(survey.layout, survey.config.train.seed)
        try:
            yield
        finally:
            world.close_model_parallel()


def set_up_data(survey: Survey, observer: Observer | None = None) -> DataSetup:
    """Tokenise the data, or find it in the cache, and lay it out for this rank; collective.

    Raises:
        DataError: a file is malformed, has changed since the start was decided, or a sample does not fit.
    """
    config, layout = survey.config, survey.layout
    told = observer or Observer()
    how = together(lambda: tokenisation(survey.base, config.data))
    train, validation = together(lambda: _build(survey, how, told))
    together(lambda: _check_unchanged(survey))
    deal = BatchLayout(
        micro_batch_size=config.train.micro_batch_size,
        data_parallel_rank=world.data_parallel_rank(),
        data_parallel_size=layout.data,
        pad_to_multiple=layout.tensor if config.parallel.sequence else 1,
        fixed_length=layout.pipeline > 1,
    )
    asks = validation is not None and config.log.sample_tokens > 0
    return DataSetup(
        train=train,
        validation=validation,
        identity=_identity(survey.data, train),
        source=_source(survey, how, train, deal),
        validation_batches=() if validation is None else tuple(validation_batches(validation, deal)),
        prompt=prompt_of(validation.first_record(), how.tokenizer) if asks and validation is not None else None,
        tokenizer=how.tokenizer,
    )


def _build(survey: Survey, how: Tokenisation, told: Observer) -> tuple[Dataset | None, Dataset | None]:
    """Return what is trained on, where that is a data set, and what the run validates with."""
    data, seed = survey.config.data, survey.config.train.seed
    if survey.program.samples is not None:
        return None, build_validation(data, how, seed, told.on_tokenising)
    built = build_datasets(data, how, seed, told.on_tokenising)
    return built.train, built.validation


def _identity(data: DataIdentity, train: Dataset | None) -> DataIdentity:
    if train is None:
        return data
    return attrs.evolve(data, num_samples=len(train.samples), num_rows=len(train.rows))


def _source(
    survey: Survey, how: Tokenisation, train: Dataset | None, layout: BatchLayout
) -> BatchSource | StreamSource:
    """Return what gives the batches of each step: of a data set, or of what the program makes then."""
    samples, data = survey.program.samples, survey.config.data
    size = survey.config.train.global_batch_size
    if train is not None:
        return BatchSource(dataset=train, seed=survey.config.train.seed, global_batch_size=size, layout=layout)
    assert samples is not None

    def make(step: int) -> list[Sample | None]:
        rows = on_rank0(lambda: rows_of(samples, step, size))
        return together(lambda: samples_of_rows(rows, data, how, f"samples {samples.name!r} of step {step}"))

    return StreamSource(make, data.sequence_length, size, layout)


def _check_unchanged(survey: Survey) -> None:
    """Refuse files that were written to after it was decided, by their content, what this start means."""
    _, found = identify_data(survey.config.data, None)
    if found != survey.data:
        raise DataError("the data changed while the run was starting", ["start again when its files are written whole"])


def set_up_model(
    survey: Survey, lifecycle: Lifecycle, observer: Observer, clock: StartClock | None = None
) -> ModelSetup:
    """Load the base, check it, attach fresh adapters, build the optimizer; collective. `clock` is told of each part.

    Raises:
        ConfigError: the model cannot be built on this platform.
        ModelMismatch: the base does not compute what Hugging Face computes.
    """
    config, platform, clock = survey.config, enter_platform(), clock or StartClock()
    backend, why = choose_backend(
        config.model.backend, platform, config.model.dtype, is_local_only=survey.shape.is_local_only
    )
    dtype = torch_dtype(config.model.dtype)
    started = time.monotonic()
    directory = together(lambda: local_directory(survey.base))
    bridge = open_bridge(directory, survey.shape.architecture)
    model = build_model(bridge, config, survey.layout, backend)
    observer.on_progress(f"loading {survey.base.name} ({backend} layers: {why})")
    clock.mark("model")
    load_base_weights(bridge, model)
    clock.mark("base")
    parity = check_base(model, directory, survey.shape, verify=config.model.verify, dtype=dtype, device=platform.device)
    observer.on_progress(f"base: {parity.reason}")
    clock.mark("parity check")
    lifecycle.advance(
        Phase.BASE_LOADED,
        backend=backend,
        backend_reason=why,
        platform=platform.name,
        parity=attrs.asdict(parity),
        seconds=round(time.monotonic() - started, 3),
    )
    attach_adapters(model, config.lora, survey.targets)
    adapters = tuple(adapter_parameters(model))
    initialise_adapters(model, adapters, config.lora, config.train.seed)
    trainable = sum(adapter.parameter.numel() for adapter in adapters)
    choice = choose_layers(model, config, survey.shape, survey.layout, platform)
    apply_choice(choice, model, config)
    lifecycle.advance(
        Phase.ADAPTER_ATTACHED,
        modules=len(survey.targets.modules),
        parameters_on_rank0=trainable,
        fused=choice.fused,
        fused_reason=choice.reason,
        cuda_graphs=choice.graphs,
        cuda_graphs_reason=choice.graphs_reason,
    )
    clock.mark("adapters")
    wrapped = wrap_for_training(model, deterministic=config.train.deterministic)
    optimizer = build_optimizer(wrapped, config.optimizer, dtype)
    lifecycle.advance(Phase.OPTIMIZER_BUILT)
    clock.mark("optimizer")
    store = AdapterStore(adapters, survey.shape.num_layers)
    return ModelSetup(model=wrapped, adapters=adapters, store=store, optimizer=optimizer, parity=parity)
