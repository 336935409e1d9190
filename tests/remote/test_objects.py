"""Objects in an S3 store: what is there, what is not, what fails, and what is never said."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from support.object_store import KEY, RESET, SECRET, Fault, ObjectStore

from ckptrain.checkpoint.object_files import STORE_FAILED, ObjectPath
from ckptrain.checkpoint.working_copy import local_path
from ckptrain.errors import ConfigError


def test_an_object_is_created_once(bucket: str) -> None:
    """The second to create it is told so, whatever it brings, and changes nothing."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    assert place.read() is None
    assert place.create(b"first")
    assert not place.create(b"second")
    assert place.read() == b"first"
    assert list(ObjectPath.parse(f"{bucket}/runs/a").list_below()) == ["thing"]


def test_a_create_whose_answer_was_lost_is_not_a_loss(store: ObjectStore, bucket: str) -> None:
    """It is tried again, is refused, and finds its own bytes there: that is what it wanted."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    store.faults(Fault(request="^PUT .*thing", status=503, count=1, done=True))
    assert place.create(b"mine")
    assert len(store.seen("^PUT .*thing")) == 2
    assert not place.create(b"another's")


def test_a_connection_that_is_reset_is_tried_again(store: ObjectStore, bucket: str) -> None:
    """In a put as in a get."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    store.faults(Fault(request="^PUT .*thing", status=RESET, count=1), Fault(request="^GET", status=RESET, count=1))
    place.write(b"data")
    assert place.read() == b"data"
    assert len(store.seen("^PUT .*thing")) == 2


def test_another_store_of_fsspec_goes_the_same_way() -> None:
    """Fsspec's store in memory: created once, listed, copied, removed."""
    run = ObjectPath.parse("memory://bucket/runs/a")
    assert run.list_below() == {}
    assert (run / "x/one").create(b"1")
    assert not (run / "x/one").create(b"2")
    (run / "x/one").copy_to(run / "y/one")
    assert {name: stored.num_bytes for name, stored in run.list_below().items()} == {"x/one": 1, "y/one": 1}
    assert (run / "y/one").digest().num_bytes == 1
    assert run.abort_uploads() == 0
    (run / "x").remove_below()
    assert list(run.list_below()) == ["y/one"]


def test_a_large_object_goes_up_in_parts(store: ObjectStore, bucket: str) -> None:
    """Of more than 16 MiB the parts are put one by one, and its digest is that of the whole."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "large"
    data = bytes(20 * 1024 * 1024)
    with place._files.open(place._key, "wb") as file:
        for start in range(0, len(data), 1 << 20):
            file.write(data[start : start + (1 << 20)])
    assert len(store.seen("^PUT .*partNumber=")) >= 2
    assert place.digest().num_bytes == len(data)


def test_a_bucket_that_is_not_there_is_a_failure(store: ObjectStore) -> None:
    """Nothing would be found in it, and a run would begin anew."""
    place = ObjectPath.parse("s3://no-such-bucket/runs/a")
    with pytest.raises(OSError, match="bucket") as failed:
        place.list_below()
    assert failed.value.errno == STORE_FAILED


def test_throttling_only_takes_time(store: ObjectStore, bucket: str) -> None:
    """Two answers of 503 SlowDown are waited out by the library."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    store.faults(Fault(request="^PUT .*thing", status=503, count=2))
    began = time.monotonic()
    place.write(b"data")
    assert time.monotonic() - began < 30
    assert len(store.seen("^PUT .*thing")) == 3
    assert place.read() == b"data"


def test_a_store_that_is_away_or_denies_is_explained_without_secrets(
    store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the URL and what was tried."""
    place = ObjectPath.parse(f"{bucket}/runs/a")
    store.faults(Fault(request="^GET", status=403))
    with pytest.raises(OSError, match="failed listing: Access Denied") as denied:
        place.list_below()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match="failed listing") as away:
        ObjectPath.parse(f"{bucket}/runs/b").list_below()
    for error in (denied.value, away.value):
        assert error.errno == errno.EREMOTEIO
        assert error.filename.startswith(bucket)
        assert KEY not in str(error)
        assert SECRET not in str(error)


def test_a_path_that_was_a_url_is_refused() -> None:
    """Pathlib makes one slash of two, and the run would be made in a directory s3: of this disk."""
    with pytest.raises(ConfigError, match="give it as a string"):
        local_path(Path("s3://bucket/run"))


@pytest.mark.parametrize(
    "url",
    ["s3://key:word@bucket/run", "s3://bucket", "s3://bucket/run?versionId=1", "file:///tmp/run", "nothing://b/run"],
)
def test_urls_that_are_refused(url: str) -> None:
    """With credentials, without a name, with a query, of a disk, of no store; the credentials are not repeated."""
    with pytest.raises(ConfigError) as refused:
        ObjectPath.parse(url)
    assert "word" not in str(refused.value)
