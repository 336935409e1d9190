"""Objects in an S3 store: what is there, what is not, what fails, and what is never said."""

from __future__ import annotations

import errno
import time

import pytest
from support.object_store import KEY, SECRET, Fault, ObjectStore

from ckptrain.checkpoint.object_files import STORE_FAILED, ObjectPath
from ckptrain.errors import ConfigError


def test_an_object_is_created_once(bucket: str) -> None:
    """The second to create it is told so, whatever it brings, and changes nothing."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    assert place.read() is None
    assert place.create(b"first")
    assert not place.create(b"second")
    assert place.read() == b"first"
    assert list(ObjectPath.parse(f"{bucket}/runs/a").list_below()) == ["thing"]


def test_a_create_whose_answer_was_lost_is_not_a_loss(bucket: str) -> None:
    """It is tried again and finds its own bytes there: that is what it wanted."""
    place = ObjectPath.parse(f"{bucket}/runs/a") / "thing"
    assert place.create(b"mine")
    assert place.create(b"mine")


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
    with pytest.raises(OSError, match="failed listing") as denied:
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


@pytest.mark.parametrize(
    "url",
    ["s3://key:word@bucket/run", "s3://bucket", "s3://bucket/run?versionId=1", "file:///tmp/run", "nothing://b/run"],
)
def test_urls_that_are_refused(url: str) -> None:
    """With credentials, without a name, with a query, of a disk, of no store; the credentials are not repeated."""
    with pytest.raises(ConfigError) as refused:
        ObjectPath.parse(url)
    assert "word" not in str(refused.value)
