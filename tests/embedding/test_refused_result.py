"""result.json of a start that was refused: there where it can be, and never over the truth of a run that finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.launch import launch

from ckptrain import Trainer, api
from ckptrain.checkpoint.lock import hold
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CkptrainError, ConfigError, StartRefused

Make = Callable[..., RunConfig]


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return RUN/result.json."""
    found: dict[str, Any] = orjson.loads((run_dir / "result.json").read_bytes())
    return found


def refused(config: RunConfig, run_dir: Path) -> str:
    """Start, and return the error."""
    try:
        with Trainer(config, run_dir=run_dir) as trainer:
            trainer.run()
    except CkptrainError as error:
        return type(error).__name__
    return ""


def test_a_refused_start_says_so_and_does_not_touch_what_was_finished(tiny_config: Make, tmp_path: Path) -> None:
    """Stopped runs get the refusal; finished ones keep their result, which is still so."""
    config, other = tiny_config("data.validation=null"), tiny_config("data.validation=null", "lora.dim=4")

    def starts() -> list[Any]:
        with Trainer(config, run_dir=tmp_path) as trainer:
            trainer.run_until(1)
        kinds = [refused(other, tmp_path)]
        failed = result_of(tmp_path)
        with Trainer(config, run_dir=tmp_path) as trainer:
            trainer.run()
        finished = result_of(tmp_path)
        kinds.append(refused(other, tmp_path))
        return [kinds, failed, finished, result_of(tmp_path)]

    [[kinds, failed, finished, after]] = launch(1, starts)
    assert kinds == ["StartRefused", "StartRefused"]
    assert (failed["status"], failed["exit_status"], failed["plan"], failed["step"]) == ("failed", 69, None, None)
    assert "lora.dim is 8 there and 4 in the config" in failed["error"]
    assert failed["last_checkpoint"] == str(tmp_path / "checkpoints/step-00000001")
    assert finished["status"] == "finished"
    assert after == finished


def test_nothing_is_written_where_there_is_no_run_or_another_one_is_at_work(tiny_config: Make, tmp_path: Path) -> None:
    """A directory is not made to say that nothing was done in it; a run at work will write its own."""
    wrong = tiny_config("model.pretrained=/nowhere/model")
    with pytest.raises(ConfigError):
        api.run(wrong, run_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    held = tmp_path / "held"
    held.mkdir()
    with hold(held):
        with pytest.raises(ConfigError):
            api.run(wrong, run_dir=held)
        assert refused(tiny_config("train.start=resume"), held) == "StartRefused"
        assert not (held / "result.json").exists()
    with pytest.raises(ConfigError):
        api.run(wrong, run_dir=held)
    assert result_of(held)["exit_status"] == 78
    with pytest.raises(StartRefused):
        api.run(tiny_config("train.start=resume"), run_dir=held)
    assert "train.start is resume" in result_of(held)["error"]
