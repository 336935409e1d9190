"""Objects in a store that fsspec knows (S3 and others): read, written, created only where there are none, listed.

Every failure of the store is an OSError with an explanation that names no secret, so that it is told as one of a disk
is. Requests are tried again, with longer and longer waits, by the store's own library; nothing here tries twice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import attrs

from ckptrain.checkpoint.manifest import FileDigest
from ckptrain.errors import ConfigError, PackageMissing

STORE_FAILED = errno.EREMOTEIO
"""The `errno` of whatever a store refuses or fails to do."""
CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_ENDPOINT_URL"
"""The variables that say who one is to an S3 store and where it is; other stores have others."""

_S3 = ("s3", "s3a")
_PART_BYTES = 16 * 1024 * 1024
"""A larger file goes up in parts of so many bytes; a store takes 10,000 of them."""
_CHUNK_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 6
"""Of one request; some half a minute altogether. AWS_MAX_ATTEMPTS and AWS_RETRY_MODE say otherwise."""
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_SHORTEST_SECRET = 6
"""A shorter one is made up, for a server on this machine, and would be found in every word."""
_LIBRARIES = {"botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "adlfs", "azure", "requests", "urllib3"}
"""Whose errors are those of a store although they are no OSError."""


@attrs.frozen(kw_only=True)
class Stored:
    """An object, as a listing has it."""

    num_bytes: int
    changed: datetime | None
    """None where the store does not say."""


@attrs.frozen
class ObjectPath:
    """A URL of an object, or of all that begin with it; can be sent to other processes."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what a URL means.

        Raises:
            ConfigError: it has credentials or a query in it, or is of no store.
            PackageMissing: what reads such URLs is not installed.
        """
        parts = urlsplit(text)
        safe = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if "@" in parts.netloc:
            wanted = f"leave them out of the URL and set them in the environment ({CREDENTIALS})"
            raise ConfigError(f"cannot use {safe}", [f"there are credentials in the URL: {wanted}"])
        if parts.query or parts.fragment or not parts.netloc or not parts.path.strip("/"):
            raise ConfigError(f"cannot use {safe}", ["expected a URL such as s3://BUCKET/runs/NAME, without ? and #"])
        _require(parts.scheme, safe)
        segments = [segment for segment in parts.path.split("/") if segment]
        if {".", ".."} & set(segments):
            raise ConfigError(f"cannot use {safe}", ["it has . or .. in it, which mean nothing to an object store"])
        return cls(f"{parts.scheme}://{parts.netloc}/{'/'.join(segments)}")

    def __truediv__(self, name: str) -> ObjectPath:
        """Return what lies below."""
        return ObjectPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec is told of the store; who one is to it, it finds in the environment by itself."""
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.url.partition("://")[0] in _S3:
            retries: dict[str, Any] = {}
            if "AWS_RETRY_MODE" not in os.environ:
                retries["mode"] = "standard"
            if "AWS_MAX_ATTEMPTS" not in os.environ:
                retries["total_max_attempts"] = _ATTEMPTS
            options |= {"default_block_size": _PART_BYTES, "config_kwargs": {"retries": retries} if retries else {}}
        return options

    def read(self) -> bytes | None:
        """Return the bytes of an object; None where there is none."""
        with self._failures("reading"):
            try:
                data: bytes = self._files.cat_file(self._key)
            except FileNotFoundError as error:
                _check_bucket(error)
                return None
        return data

    def write(self, data: bytes) -> None:
        """Put an object, in place of the one that is there."""
        with self._failures("writing"):
            self._files.pipe_file(self._key, data)

    def create(self, data: bytes) -> bool:
        """Put an object where there is none; false where there is another."""
        with self._failures("writing"):
            try:
                self._files.pipe_file(self._key, data, mode="create")
            except OSError as error:
                if not _is_taken(error):
                    raise
            else:
                return True
        # A request may have been done although its answer was lost, and have been tried again.
        return self.read() == data

    def list_below(self, prefix: str = "") -> dict[str, Stored]:
        """Return all objects below whose name begins with `prefix`, by what follows this URL, in order.

        Raises:
            OSError: it cannot be listed; where nothing is below there is nothing to raise.
        """
        with self._failures("listing"):
            try:
                found = self._files.find(f"{self._key}/", detail=True, **({"prefix": prefix} if prefix else {}))
            except FileNotFoundError as error:
                _check_bucket(error)
                found = {}
            if not found:
                self._check_listable()
        start = len(self._key) + 1
        return {
            path[start:]: Stored(num_bytes=int(info["size"]), changed=_changed(info))
            for path, info in sorted(found.items())
            if path[start:] and info["type"] == "file"
        }

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes of an object in pieces.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._failures("reading"), self._files.open(self._key, "rb", block_size=_CHUNK_BYTES) as file:
            while data := file.read(_CHUNK_BYTES):
                yield data

    def digest(self) -> FileDigest:
        """Read an object, and return its size and SHA-256."""
        sha256, num_bytes = hashlib.sha256(), 0
        for data in self.chunks():
            sha256.update(data)
            num_bytes += len(data)
        return FileDigest(num_bytes=num_bytes, sha256=sha256.hexdigest())

    def copy_to(self, target: ObjectPath) -> None:
        """Copy an object within the store."""
        with self._failures("copying"):
            self._files.cp_file(self._key, target._key)

    def remove(self) -> None:
        """Remove an object; nothing where there is none."""
        with self._failures("removing"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._key)

    def remove_below(self) -> None:
        """Remove all that lies below."""
        names = list(self.list_below())
        with self._failures("removing"):
            if names:
                self._files.rm([f"{self._key}/{name}" for name in names])

    def abort_uploads(self) -> int:
        """Drop the parts below of uploads that were never completed, which no listing shows; returns how many."""
        list_uploads = getattr(self._files, "list_multipart_uploads", None)
        if list_uploads is None:
            return 0
        bucket, key, _ = self._files.split_path(self._key)
        with self._failures("cleaning"):
            left = [upload for upload in list_uploads(bucket) if upload["Key"].startswith(f"{key}/")]
            for upload in left:
                self._files.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        return len(left)

    @property
    def _files(self) -> Any:
        """The file system; asked for each time, as one that was made before a fork is of no use after it."""
        import fsspec

        return fsspec.filesystem(self.url.partition("://")[0], **self.options)

    @property
    def _key(self) -> str:
        stripped: str = self._files._strip_protocol(self.url)
        return stripped

    def _check_listable(self) -> None:
        """Tell a store without such a bucket from one that holds nothing there; only S3 can be asked."""
        if self.url.partition("://")[0] in _S3:
            self._files.call_s3("head_bucket", Bucket=self._files.split_path(self._key)[0])

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        with store_failures(self.url, doing):
            yield


@contextlib.contextmanager
def store_failures(url: str, doing: str) -> Iterator[None]:
    """Turn whatever a store, or the way to it, fails to do into an OSError that says so without secrets.

    Raises:
        FileNotFoundError: as it is, where an object is not there.
        OSError: everything else; `errno` is STORE_FAILED and `filename` the URL.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each library has its own kinds
        if not _is_of_a_store(error):
            raise
        if isinstance(error, OSError) and error.errno == STORE_FAILED and error.filename:
            raise  # explained already
        raise OSError(STORE_FAILED, f"the store failed {doing}: {_explained(error)}", url) from None


def _require(scheme: str, url: str) -> None:
    if importlib.util.find_spec("fsspec") is None:
        raise PackageMissing(f"{url} needs fsspec", ["fsspec is not installed: pip install 'ckptrain[s3]'"])
    from fsspec.registry import known_implementations, registry

    if scheme in ("file", "local"):
        raise ConfigError(f"cannot use {url}", ["it is on a disk: give the path alone"])
    if scheme in _S3:
        if importlib.util.find_spec("s3fs") is None:
            raise PackageMissing(f"{url} needs s3fs", ["s3fs is not installed: pip install 'ckptrain[s3]'"])
        return
    if scheme not in known_implementations and scheme not in registry:
        raise ConfigError(f"cannot use {url}", [f"fsspec knows no store {scheme}://"])
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        raise PackageMissing(f"{url} cannot be used", [str(error)]) from error


def _is_of_a_store(error: Exception) -> bool:
    rooms = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(rooms & _LIBRARIES)


def _is_taken(error: OSError) -> bool:
    """Tell whether an object could not be created because there is one."""
    response = getattr(error.__cause__, "response", None) or {}
    return isinstance(error, FileExistsError) or response.get("Error", {}).get("Code") in (
        "PreconditionFailed",
        "ConditionalRequestConflict",
    )


def _check_bucket(error: FileNotFoundError) -> None:
    """Leave an object that is not there to the caller; a bucket that is not there is a failure."""
    response = getattr(error.__cause__, "response", None) or {}
    if response.get("Error", {}).get("Code") == "NoSuchBucket":
        raise OSError(errno.ENODEV, "there is no such bucket") from error


def _explained(error: BaseException) -> str:
    """Return what an error says on one line, without what must not be told."""
    text = " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) >= _SHORTEST_SECRET:
            text = text.replace(secret, f"${name}")
    text = re.sub(r"//[^/@\s]*@", "//", text)
    return text or type(error).__name__


def _changed(info: dict[str, Any]) -> datetime | None:
    found = info.get("LastModified") or info.get("created") or info.get("updated")
    return found if isinstance(found, datetime) else None


def download(source: ObjectPath, target: Path) -> FileDigest:
    """Write an object to a new file, and return the size and SHA-256 of what came."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sha256, num_bytes = hashlib.sha256(), 0
    with target.open("xb") as file:
        for data in source.chunks():
            sha256.update(data)
            num_bytes += file.write(data)
    return FileDigest(num_bytes=num_bytes, sha256=sha256.hexdigest())
