"""Asks TensorFlow Serving over REST what images show. Needs nothing but Python.

python rest_client.py --model digits photo.jpg other.png
"""

import argparse
import base64
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def predict(
    files: Sequence[Path], *, url: str, model: str, timeout: float, retries: int
) -> list[dict[str, Any]]:
    """Sends one batch of image files and returns an answer for each, best class first."""
    contents = [base64.b64encode(file.read_bytes()).decode() for file in files]
    body = json.dumps({"instances": [{"b64": content} for content in contents]}).encode()
    request = urllib.request.Request(f"{url}/v1/models/{model}:predict", body)
    for attempt in range(retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return list(json.load(response)["predictions"])
        except urllib.error.HTTPError as error:
            if error.code != 503 or attempt == retries:  # what the request itself got wrong stays
                raise RuntimeError(json.loads(error.read())["error"]) from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
            if attempt == retries:
                raise RuntimeError(f"{url} does not answer: {error}") from None
        time.sleep(0.2 * 2**attempt)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the labels of each image; returns 1 if one could not be classified."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--url", default="http://localhost:8501")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8, help="images in a request (default: 8)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds (default: 30)")
    parser.add_argument("--retries", type=int, default=4, help="while unavailable (default: 4)")
    options = parser.parse_args(arguments)
    failed = 0
    for start in range(0, len(options.images), options.batch):
        files = options.images[start : start + options.batch]
        try:
            answers = predict(
                files,
                url=options.url,
                model=options.model,
                timeout=options.timeout,
                retries=options.retries,
            )
        except (RuntimeError, OSError) as error:
            print(f"{', '.join(map(str, files))}: {error}", file=sys.stderr)
            failed = 1
            continue
        for file, answer in zip(files, answers, strict=True):
            found = zip(answer["classes"], answer["scores"], strict=True)
            print(f"{file}: " + ", ".join(f"{label} {score:.1%}" for label, score in found))
    return failed


if __name__ == "__main__":
    sys.exit(main())
