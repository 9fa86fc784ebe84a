"""Asks TensorFlow Serving over REST what images show. Needs nothing but Python.

python rest_client.py --model digits photo.jpg other.png
"""

import argparse
import base64
import http.client
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What the same request may succeed at a moment later: a full queue, or a server that starts.
RETRIABLE = (429, 503)
LONGEST_PAUSE = 10  # seconds


def predict(
    files: Sequence[Path], *, url: str, model: str, timeout: float, retries: int
) -> list[dict[str, Any]]:
    """Sends one batch of image files and returns an answer for each, best class first.

    To ask again is safe: a prediction changes nothing on the server. The pauses grow and are drawn,
    so that clients that failed together do not come back together.
    """
    contents = [base64.b64encode(file.read_bytes()).decode() for file in files]
    body = json.dumps({"instances": [{"b64": content} for content in contents]}).encode()
    request = urllib.request.Request(f"{url}/v1/models/{model}:predict", body)
    for attempt in range(retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return list(json.load(response)["predictions"])
        except urllib.error.HTTPError as error:
            if error.code not in RETRIABLE or attempt == retries:
                raise RuntimeError(reason(error.read())) from None
        except TimeoutError:  # not again: the request would add to the load that made it late
            raise RuntimeError(f"{url} did not answer in {timeout} seconds") from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            if attempt == retries:
                raise RuntimeError(f"{url} does not answer: {error}") from None
        time.sleep(random.uniform(0.5, 1) * min(0.4 * 2**attempt, LONGEST_PAUSE))  # noqa: S311
    return []


def reason(body: bytes) -> str:
    """Returns what a refusal says; a proxy in front of the server may not answer in JSON."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


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
            if answer["status"] != "OK":
                print(f"{file}: {answer['status']}", file=sys.stderr)
                failed = 1
                continue
            found = zip(answer["classes"], answer["scores"], strict=True)
            print(f"{file}: " + ", ".join(f"{label} {score:.1%}" for label, score in found))
    return failed


if __name__ == "__main__":
    sys.exit(main())
