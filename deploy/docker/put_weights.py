"""Put weights into an S3 store, unless they are there already: a file, a directory, or the sample that is installed.

    put-weights sample s3://weights/smollm2.gguf
    put-weights ./my-model/ s3://weights/my-model/

Endpoint, region and credentials come from the AWS_* variables. The bucket is created if it does not exist.
"""

import argparse
import os
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from glowplug.engines.samples import sample_weights_path

PATIENCE_S = 300.0  # for a store that is starting, or slow
EXISTS = 409  # BucketAlreadyOwnedByYou


def open_bucket(bucket: str) -> Any:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3")
    config: Any = {"aws_endpoint_url_s3": endpoint, "virtual_hosted_style_request": False} if endpoint else {}
    return S3Store(bucket, config=config, client_options={"allow_http": True, "timeout": timedelta(seconds=PATIENCE_S)})


def make_bucket(store: Any) -> None:
    """Send CreateBucket, a signed PUT of the bucket's own address. Raises OSError if the store refuses or is away."""
    address = obstore.sign(store, "PUT", "", timedelta(minutes=5))
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", data=b""), timeout=30).close()
    except urllib.error.HTTPError as error:
        if error.code != EXISTS:
            raise OSError(f"the store answered {error.code}: {error.read(300)!r}") from error


def put(store: Any, source: Path, key: str) -> None:
    """Upload one object, unless the store has one of that size. Raises OSError or obstore's own errors."""
    size = source.stat().st_size
    try:
        if obstore.head(store, key)["size"] == size:
            print(f"{key}: {size} bytes are there already")
            return
    except FileNotFoundError:
        print(f"{key}: sending {size} bytes")
    obstore.put(store, key, source, max_concurrency=2)


def put_all(store: Any, source: Path, key: str) -> None:
    """Upload a file, or every file below a directory."""
    make_bucket(store)
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for file in files:
        put(store, file, key + file.relative_to(source).as_posix() if source.is_dir() else key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a file, a directory, or the word: sample")
    parser.add_argument("target", help="s3://bucket/key, or s3://bucket/prefix/ for a directory")
    told = parser.parse_args()
    target = urlsplit(told.target)
    source = sample_weights_path() if told.source == "sample" else Path(told.source)
    if not source.exists():
        parser.error(f"{source} does not exist")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            put_all(open_bucket(target.netloc), source, target.path.lstrip("/"))
            return 0
        except (BaseError, OSError) as error:
            first = (str(error).splitlines() or [""])[0][:300]
            if time.monotonic() > deadline:
                sys.exit(f"put-weights: {type(error).__name__}: {first}")
            print(f"again in a second: {type(error).__name__}: {first}", flush=True)
            time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
